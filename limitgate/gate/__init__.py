"""From a request to an answer."""
