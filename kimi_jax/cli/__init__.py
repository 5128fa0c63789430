"""The command `kimi-jax`."""
