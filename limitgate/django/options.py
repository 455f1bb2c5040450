"""``LIMITGATE`` in Django's settings: the options of a gate, in Django's way of writing them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

from django.conf import settings

from limitgate.errors import ConfigError
from limitgate.gate.build import GateOptions
from limitgate.rules.settings import Settings
from limitgate.suggestions import expected_of

DjangoOptions = GateOptions[Any, Any, Any]


def options() -> DjangoOptions:
    """The options in ``settings.LIMITGATE``, named as in `Settings`; none where there is no ``LIMITGATE``.

    Raises `ConfigError` where it is no dict, or names an option twice or one that does not exist.
    """
    mapping = getattr(settings, "LIMITGATE", None)
    if mapping is None:
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
