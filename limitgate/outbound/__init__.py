"""Limits on outgoing requests: the part that all HTTP client libraries share."""
