"""Limits on outgoing requests: the code shared by all HTTP client libraries.

options.py          options of all clients
throttle.py         one request: wait for a turn, send, obey the rate fields, retry
host_load.py        load of each host, learned from its responses
strict.py           limits that hold in any period
response_fields.py  the rate fields of a response
httpx_transports.py transports for httpx and httpx2
bodies.py           URLs and refusal bodies of urllib3, also for requests
deadline.py         a deadline for socket reads
"""
