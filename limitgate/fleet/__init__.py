"""Shows the state of a service's processes, from snapshots that each process writes to the store every 2 seconds.

sketch.py      who uses a rule most: Space-Saving with a filter against floods; pure
tally.py collects clients and refusals outside the path of requests
snapshot.py    one compact value per gate of a process; pure
gate_state.py  what the snapshot of a gate says
publisher.py   writes it, in a task or a thread
figures.py     adds up the snapshots of all processes; pure
reader.py      reads them for status, top, the page and the exporter
actions.py     bans, pardons and resets of clients in the figures
exporter.py    the same for Prometheus, kept while processes come and go
"""
