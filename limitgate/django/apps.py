"""``"limitgate.django"`` in ``INSTALLED_APPS``: system checks, nothing else."""

from __future__ import annotations

from django.apps import AppConfig
from django.core.checks import register

from limitgate.django.checks import check


class LimitGateConfig(AppConfig):  # type: ignore[misc]  # Django is not typed
    """Has Django check the settings, the middleware and the rules whenever a command starts."""

    name = "limitgate.django"
    label = "limitgate"
    verbose_name = "LimitGate"

    def ready(self) -> None:
        """Register the checks."""
        register(check)
