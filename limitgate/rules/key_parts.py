"""Key parts as rules write them. `limitgate.keys` reads their values."""

from __future__ import annotations

import re
from functools import lru_cache

from limitgate.errors import ConfigError
from limitgate.messages.suggestions import expected_of

PARTS = ("path", "ip", "api_key", "method", "host", "user", "caller", "tier", "global")
_HEADER = r"[!#$%&'*+.^_`|~0-9A-Za-z-]{1,128}"
_HEADER_PART = re.compile(f"header:{_HEADER}", re.ASCII)
_HEADER_NAME = re.compile(f"(?!(?i:HTTP_)){_HEADER}", re.ASCII)


@lru_cache(maxsize=1024)
def check_part(name: str) -> tuple[str, ...]:
    """The alternatives in one part of a key, as they are known inside. Raises `ConfigError`."""
    labels = tuple(label.strip() for label in name.split("|"))
    for label in labels:
        if label not in PARTS and not _HEADER_PART.fullmatch(label):
            expected = expected_of(label, [*PARTS, "header:NAME"])
            other = "for anything else there is 'caller', whom the option identify names"
            raise ConfigError(f"key part {label!r:.80} is unknown, {expected}, alternatives separated by '|'; {other}")
    return tuple(label if label in PARTS else label.lower() for label in labels)


def check_header(name: str) -> str:
    """The name of a header as it is sent. Raises `ConfigError` for what is none, or is spelled as in an environ."""
    if not _HEADER_NAME.fullmatch(name):
        raise ConfigError(f"{name!r:.80} is no name of a header, expected it as it is sent, such as x-forwarded-for")
    return name


def check_secret(secret: str | None) -> bytes:
    """The bytes that key the digests in the store, none for None. Raises `ConfigError`, which does not tell the secret."""
    key = (secret or "").encode()
    if secret is not None and not 16 <= len(key) <= 64:
        raise ConfigError("expected a secret of 16 to 64 bytes")
    return key
