"""Builds a gate, starts it, and reloads its rules."""
