"""Requests through the runtime: batches, sessions, conversations."""
