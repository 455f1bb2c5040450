"""Decides for proxies: `ForwardGate` answers their subrequests, `limitgate.forward.rate_limit_service` Envoy's gRPC calls.

Both build the request that the proxy describes, and pass it to the gate of `limitgate.LimitGate`.
"""

from limitgate.forward.gate import ForwardGate

__all__ = ["ForwardGate"]
