"""Overload protection: how many requests this process can handle, and which to refuse."""
