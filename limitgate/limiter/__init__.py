"""Limiters for any key, without HTTP."""
