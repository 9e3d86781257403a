"""What a job costs before it runs."""
