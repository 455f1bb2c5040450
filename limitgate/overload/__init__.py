"""Overload protection: how many requests this process can handle, and which to refuse.

All modules except the last two are pure functions of state, sample and time in seconds. Of ``lag.py``, `LagGuard` and
`ProxyQueue` are pure.

    options.py          bounds, set by users
    adaptive_limit.py   admits requests, combines the modules below
    littles_law.py      the limit, from completions
    baseline.py         unloaded durations of requests, and dips that measure them
    shedding.py         priorities, thinning, the queue for permits, and Retry-After
    adaptive_throttle.py  withholds requests from overloaded hosts
    lag.py              detects late event loops and queues at a proxy
    concurrency_limiter.py  adds lock, clock and waiting
"""
