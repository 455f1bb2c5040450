"""Key parts as rules write them. `limitgate.keys` reads their values."""

from __future__ import annotations

import re
from functools import lru_cache

from limitgate.errors import ConfigError

PARTS = ("path", "ip", "api_key", "method", "host", "user", "caller", "tier", "global")
_HEADER_PART = re.compile(r"header:[!#$%&'*+.^_`|~0-9A-Za-z-]{1,128}", re.ASCII)
_EXPECTED = f"expected one of {', '.join(PARTS)} or header:NAME, alternatives separated by '|'"


@lru_cache(maxsize=1024)
def check_part(name: str) -> tuple[str, ...]:
    """The alternatives in one part of a key, as they are known inside. Raises `ConfigError`."""
    labels = tuple(label.strip() for label in name.split("|"))
    for label in labels:
        if label not in PARTS and not _HEADER_PART.fullmatch(label):
            raise ConfigError(f"key part {label!r} is unknown, {_EXPECTED}")
    return tuple(label if label in PARTS else label.lower() for label in labels)


def check_secret(secret: str | None) -> bytes:
    """The bytes that key the digests in the store, none for None. Raises `ConfigError`, which does not tell the secret."""
    key = (secret or "").encode()
    if secret is not None and not 16 <= len(key) <= 64:
        raise ConfigError("expected a secret of 16 to 64 bytes")
    return key
