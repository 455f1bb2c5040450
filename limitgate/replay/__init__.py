"""Access logs sent through rules: what would have been refused, and which limits would have fitted.

access_log.py    lines of a log become entries
engine.py        entries go through a gate on the log's own clock
figures.py       what came of it, of one process or of several
suggestion.py    the smallest limits under which nobody, or almost nobody, would have been refused
shares.py        one log among several processes, by client
"""
