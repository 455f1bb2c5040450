"""LimitGate for Django: ``"limitgate.django.LimitGateMiddleware"`` in ``MIDDLEWARE``, with options in ``LIMITGATE``."""

from __future__ import annotations

from limitgate.messages.text import extra

with extra("django", "django", "asgiref"):
    from limitgate.django.middleware import LimitGateMiddleware

__all__ = ["LimitGateMiddleware"]
