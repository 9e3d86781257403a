"""Training algorithms: advantages and losses here are pure; each algorithm is one screen over roles and batches."""
