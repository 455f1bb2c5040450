"""Rules written in Python, in YAML, or as decorators."""
