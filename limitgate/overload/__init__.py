"""Overload: how many requests this process can work on at the moment, and who is let in when not all can be.

All but the last two modules are functions of state, sample and time, in seconds: they read no clock, do not sleep, and know
nothing of asyncio or HTTP.

    options.py          `Adaptive`: the bounds that a user sets
    adaptive_limit.py   `AdaptiveLimit`: begin -> ticket or refusal; done teaches; everything below put together
    littles_law.py      the limit, from the completions of a window
    baseline.py         the time of a class of requests on an idle server
    dip.py              when and how the limit is lowered for a moment to measure that time
    lag_guard.py        `LagGuard`: an event loop that is late, known by its heartbeat
    proxy_queue.py      `ProxyQueue`: the same by the time that a proxy says requests have waited
    thinning.py         which share of low and normal priority is turned away so that high is served
    waiting_line.py     who waits for a place, in which order, and who has waited too long
    adaptive_throttle.py  `AdaptiveThrottle`: which requests a client keeps to itself, by how few the other side accepts
    shedding.py         counts of each priority; the share refused lately and the Retry-After that it gives
    concurrency_limiter.py    places in flight under an `AdaptiveLimit`, for threads and event loops: lock, clock and waiting
    heartbeat.py        timers of event loops, and the queue of connections, that tell the `LagGuard` how late a loop is
"""
