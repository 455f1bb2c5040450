"""Sends access logs through rules: shows which requests would have been refused, and which limits would fit."""
