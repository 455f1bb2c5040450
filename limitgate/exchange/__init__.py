"""Connects an application with its server."""
