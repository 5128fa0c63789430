"""Commands on texts: their tokens, and how probable they are."""
