"""What a compiled CUDA program costs by part: bytes, launches, waits, products; and its floor."""
