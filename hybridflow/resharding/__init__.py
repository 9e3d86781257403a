"""Moves weights from the training layout into the rollout layout: a pure plan, its execution, and its verification."""
