"""Overload protection: how many requests this process can handle, and which to refuse.

All modules except the last two are pure functions of state, sample and time in seconds.

    options.py          bounds, set by users
    adaptive_limit.py   admits requests, combines the modules below
    littles_law.py      the limit, from completions
    baseline.py         unloaded durations of requests
    dip.py              short reductions of the limit that measure them
    lag_guard.py        detects late event loops
    proxy_queue.py      detects queues by waits that a proxy reports
    thinning.py         refuses low and normal priority in favor of high
    waiting_line.py     the queue for permits
    adaptive_throttle.py  withholds requests from overloaded hosts
    shedding.py         counts per priority, and Retry-After
    concurrency_limiter.py  adds lock, clock and waiting
    heartbeat.py        timers of event loops for `LagGuard`
"""
