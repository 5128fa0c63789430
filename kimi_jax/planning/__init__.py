"""Which mesh and placement to run on, from shapes alone."""
