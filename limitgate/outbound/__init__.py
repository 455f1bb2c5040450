"""Limits on outgoing requests: the code shared by all HTTP client libraries."""
