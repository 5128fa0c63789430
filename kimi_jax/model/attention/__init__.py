"""The hard operations of attention, without weights: the delta rule, latent rows, selection."""
