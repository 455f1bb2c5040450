"""Code shared by all HTTP client libraries."""
