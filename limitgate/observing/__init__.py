"""Metrics for observers, and log lines about refusals."""
