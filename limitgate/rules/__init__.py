"""Rules: which requests a limit is for; written in Python, in YAML or as decorators."""
