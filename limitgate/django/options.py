"""``LIMITGATE`` in Django's settings: the options of a gate."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

from django.conf import settings

from limitgate.errors import ConfigError
from limitgate.gate.lifecycle.build import GateOptions
from limitgate.messages.text import expected_of
from limitgate.rules.settings import PREFIX, Settings

DjangoOptions = GateOptions[Any, Any, Any]


def options() -> DjangoOptions:
    """Return the options in ``settings.LIMITGATE`` by their names in `Settings`.

    Raises `ConfigError` if it isn't a dict, for unknown and duplicate options, and for settings such as ``LIMITGATE_RULES``
    without it.
    """
    mapping = getattr(settings, "LIMITGATE", None)
    if mapping is None:
        _check_has_no_other()
        return {}
    if not isinstance(mapping, Mapping):
        raise ConfigError(f"LIMITGATE is a {type(mapping).__name__}, expected a dict of options")
    chosen: dict[str, object] = {}
    for name, value in mapping.items():
        option = str(name).lower()
        if option not in Settings.model_fields:
            expected = expected_of(option, sorted(Settings.model_fields))
            raise ConfigError(f"LIMITGATE: unknown option {name!r:.80}, {expected}, in upper or lower case")
        if option in chosen:
            raise ConfigError(f"LIMITGATE: option {option!r} is there twice, expected it in upper or in lower case")
        chosen[option] = value
    return cast("DjangoOptions", chosen)


def _check_has_no_other() -> None:
    for option in Settings.model_fields:
        name = f"{PREFIX}{option.upper()}"
        if getattr(settings, name, None) is not None:
            raise ConfigError(f"settings have {name}, which nobody reads, expected LIMITGATE = {{{option.upper()!r}: ...}}")
