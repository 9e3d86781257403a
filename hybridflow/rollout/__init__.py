"""Rollout: vLLM engines inside the training processes."""
