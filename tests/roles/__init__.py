"""Tests of hybridflow.roles."""
