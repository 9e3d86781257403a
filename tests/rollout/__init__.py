"""Tests of hybridflow.rollout."""
