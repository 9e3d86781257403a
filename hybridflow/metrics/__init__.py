"""What a run measures and how it shows it."""
