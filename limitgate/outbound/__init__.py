"""Limits on outgoing requests: the part that all HTTP client libraries share.

options.py          options that the clients of every library have
throttle.py         a request on its way: wait for a turn, send, heed the answer, come back
host_load.py        which requests an overloaded host is spared, by how it has answered
strict.py           limits that hold in any period
response_fields.py  what a response says of the service's own limits
httpx_transports.py transports for httpx and httpx2, written once
bodies.py           URLs and refusals as urllib3 has them, which requests sends with, too
deadline.py         an end to reading from a socket
"""
