"""Strings and token ids; knows no arrays."""
