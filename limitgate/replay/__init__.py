"""Sends access logs through rules: what would have been refused, and which limits would fit.

access_log.py    parses lines
engine.py        sends entries through a gate, on the log's clock
suggestion.py    the smallest limits with no refusal, or almost none
"""
