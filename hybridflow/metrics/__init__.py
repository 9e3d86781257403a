"""What a run writes and shows: JSONL, TensorBoard, the console, plots, the closing summary."""
