"""The vision tower and its projector: from patches of an image to rows of the decoder."""
