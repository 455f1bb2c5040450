"""Shows the state of a service's processes, from snapshots that each process writes to the store every 2 seconds."""
