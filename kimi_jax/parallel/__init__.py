"""Where arrays live and how they move between devices; knows no layer."""
