"""Redis for threads."""
