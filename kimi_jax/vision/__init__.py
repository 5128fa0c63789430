"""Images before the model: how an image becomes patches. Knows no weights and no device."""
