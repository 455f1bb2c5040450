"""Load, stalls and want: Redis is well, and what is short is this machine. No limit may give way to it."""
