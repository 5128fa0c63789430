"""Images at run time: rows out of patches, and rows in the place of embeddings."""
