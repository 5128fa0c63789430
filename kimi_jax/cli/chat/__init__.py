"""`kimi-jax chat`: a conversation in the terminal, or with a pipe."""
