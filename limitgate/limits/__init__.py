"""Limits, the buckets that they share, and what is planned, read and decided about these. Pure."""
