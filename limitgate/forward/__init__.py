"""Decides for proxies: `ForwardGate` answers subrequests, `limitgate.forward.rate_limit_service` Envoy's gRPC calls."""

from limitgate.forward.gate import ForwardGate

__all__ = ["ForwardGate"]
