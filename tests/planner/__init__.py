"""Tests of hybridflow.planner."""
