"""A gate over time: it is built, it starts, and other rules come into force while it runs."""
