"""Drains a Redis Stream at a fixed rate, over several processes: ``python -m example_app.worker run --rate 100/second``.

Each process has one job in hand at most. It reads one, waits for its turn by `AsyncLimiter.pace`, which all of them share,
works on it and acknowledges it. Whoever has a job in hand says so four times in the idle time, however long it takes. So the
idle time is only for what a dead worker leaves: then another one claims that.

Every job is done at least once. It is done twice only if its worker died between the work and the acknowledgement, or stood
still or was cut off from Redis for longer than the idle time. A handler that blocks its event loop stands still, too.
"""
