"""``"limitgate.django"`` in ``INSTALLED_APPS``: only adds system checks."""

from __future__ import annotations

from django.apps import AppConfig
from django.core.checks import register

from limitgate.django.checks import check


class LimitGateConfig(AppConfig):  # type: ignore[misc]  # Django is not typed
    """Makes Django check settings, middleware and rules when a command starts."""

    name = "limitgate.django"
    label = "limitgate"
    verbose_name = "LimitGate"

    def ready(self) -> None:
        """Register the checks."""
        register(check)
