"""Limits on outgoing requests: the code shared by all HTTP client libraries.

options.py          options of all clients, and limits that hold in any period
throttle.py         one request: wait for a turn, send, obey the rate fields, retry
host_load.py        load of each host, learned from its responses
response_fields.py  the rate fields of a response
httpx_transports.py transports for httpx and httpx2
bodies.py           URLs and refusal bodies of urllib3, also for requests
"""
