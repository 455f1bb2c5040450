"""Buckets in Redis."""
