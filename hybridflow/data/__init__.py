"""Problems, demonstrations, tokenizers, model folders and packing into micro-batches."""
