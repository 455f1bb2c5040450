"""Limits, buckets, plans, readings and decisions. Pure."""
