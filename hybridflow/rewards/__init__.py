"""Scorers of responses and the process pool that runs them."""
