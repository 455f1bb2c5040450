"""Exit statuses of the command."""

FINE = 0
FOUND = 1
"""A mistake, a request that would be refused, a process that does not follow."""
WRONG_USAGE = 2
"""click's own."""
NO_STORE = 3
"""The store does not answer."""
INTERRUPTED = 130
"""128 and the number of SIGINT, as shells have it: Ctrl-C ended it, and nothing was found."""
NO_READER = 141
"""128 and the number of SIGPIPE: whoever read the output has gone."""
