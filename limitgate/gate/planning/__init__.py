"""Turns a request into a plan: rules, buckets and charges."""
