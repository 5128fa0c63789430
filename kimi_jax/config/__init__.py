"""The sizes and switches of one model, and the released files that they are read from."""
