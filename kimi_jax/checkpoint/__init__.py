"""Checkpoint folders: names, headers, reading and writing."""
