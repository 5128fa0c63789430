"""What is computed, written per device: no sampling, no text, no files."""
