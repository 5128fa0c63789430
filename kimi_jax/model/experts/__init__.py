"""The routed experts: weights, implementations, dispatch over ranks."""
