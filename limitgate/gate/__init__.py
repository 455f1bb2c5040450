"""Decides about requests before and while the application runs them."""
