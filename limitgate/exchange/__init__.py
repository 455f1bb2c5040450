"""Exchanges: messages, calls and chunks between an application and its server."""
