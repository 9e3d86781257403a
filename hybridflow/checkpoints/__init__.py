"""Checkpoints of a run: their folders, what a run resumes from, and the driver's part of saving and loading."""
