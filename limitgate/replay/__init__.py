"""Sends access logs through rules: what would have been refused, and which limits would have fitted.

access_log.py    parses lines of a log
engine.py        sends entries through a gate, on the log's clock, in one process or several, and counts
suggestion.py    the smallest limits that would have refused no request, or almost none
"""
