"""Sends access logs through rules: what would have been refused, and which limits would have fitted.

access_log.py    parses lines of a log
engine.py        sends entries through a gate, on the log's clock
figures.py       results, of one or several processes
suggestion.py    the smallest limits that would have refused no request, or almost none
shares.py        divides a log among processes, by client
"""
