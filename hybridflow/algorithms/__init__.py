"""Reinforcement learning: each algorithm on one screen, over roles and batches."""
