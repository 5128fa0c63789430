"""Compiled programs on a mesh: weights in place, steps, what a device holds."""
