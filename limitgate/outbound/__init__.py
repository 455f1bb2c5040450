"""Limits on what goes out: what the doors for HTTP clients share, whatever the client library."""
