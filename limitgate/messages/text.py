"""Text in messages: lists, masked names, suggestions, missing extras."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from difflib import SequenceMatcher, get_close_matches
from importlib.util import find_spec
from typing import Literal, NoReturn, TypeVar

MOST = 10
"""Maximum of entries in a list."""
LONGEST = 200
"""Maximum of characters in a value from a client."""


def listed(entries: Collection[str], between: str = ", ", *, most: int = MOST) -> str:
    """``a, b, … and 990 more``."""
    told = entries if len(entries) <= most + 1 else [*entries][:most]
    text = between.join([shortened(each) for each in told])
    left_out = len(entries) - len(told)
    return f"{text}{between}… and {left_out:,} more" if left_out else text


def shortened(text: str, longest: int = LONGEST) -> str:
    return text if len(text) <= longest else f"{text[: longest - 1]}…"


Names = Literal["masked", "full", "off"]
"""How a client's name appears: its first and last characters, all of it, or not at all."""

SAYABLE = frozenset({"path", "method", "tier"})
"""Key parts that never identify a client."""
_CREDENTIALS = frozenset({"api_key", "header:authorization", "header:proxy-authorization", "header:cookie"})
"""Key parts that are never shown in full."""
HIDDEN = "…"
"""A short name."""
_SHOWN = 3
"""Characters at each end."""
ORDERS = re.compile(r"##(?=[A-Za-z]*\[)")
"""CI commands: ``##[error]`` (GitHub), ``##vso[`` (Azure Pipelines), ``##teamcity[``."""


def masked(name: str) -> str:
    """First and last characters, at most half: ``20….7`` for 203.0.113.7."""
    shown = min(_SHOWN, len(name) // 4)
    return _replaced(f"{name[:shown]}…{name[len(name) - shown :]}")


def printable(text: str) -> str:
    """Escape control characters and CI commands."""
    text = ORDERS.sub(r"#\\x23", text)
    if text.isprintable():
        return text
    return "".join([each if each.isprintable() else each.encode("unicode_escape").decode() for each in text])


def shown(label: str, value: str, names: Names = "masked") -> str:
    """Return the value of a key part for display; empty if ``names`` is off."""
    if names == "off":
        return ""
    is_full = label in SAYABLE or (names == "full" and label.lower() not in _CREDENTIALS)
    return _replaced(value[:LONGEST]) if is_full else masked(value)


def _replaced(text: str) -> str:
    return "".join([character if character.isprintable() else "\ufffd" for character in text])


Kind = TypeVar("Kind", bound=type)

_ELSEWHERE = {
    "application_limits": "rules",
    "async+memory": "memory",
    "async+redis": "redis",
    "async+redis+cluster": "redis+cluster",
    "async+rediss": "rediss",
    "backend": "store",
    "block_duration": "ban",
    "burst": "limits",
    "client_ip": "ip",
    "days": "limits",
    "deduct_when": "charge_if",
    "default_limits": "rules",
    "exempt_when": "when",
    "fail_open": "on_error",
    "hours": "limits",
    "key_func": "key",
    "limit": "limits",
    "limits": "rules",
    "meta_limits": "ban",
    "milliseconds": "limits",
    "minutes": "limits",
    "override_defaults": "replaces",
    "per_method": "key",
    "rate": "limits",
    "rates": "limits",
    "redis": "store",
    "redis+tls": "rediss",
    "redis+unix": "unix",
    "redis_url": "store",
    "remote_addr": "ip",
    "rpd": "qpd",
    "rph": "qph",
    "rpm": "qpm",
    "rps": "qps",
    "seconds": "limits",
    "storage_uri": "store",
    "store": "limiter",
    "strategy": "algorithm",
    "swallow_errors": "on_error",
    "times": "limits",
    "url": "path",
    "valkey": "redis",
    "valkeys": "rediss",
    "x_api_key": "api_key",
    "x_forwarded_for": "ip",
    "x_real_ip": "ip",
}

_TEXT = "limits are text such as '5 per 15 minutes' or '10/s burst 20'; "

_MOST = 100
"""Up to this many names, all are listed."""

_LONG = 5
"""Length from which a part of a name suggests it: ``socket_timeout`` for ``timout``."""


def meant(name: object, known: Iterable[str]) -> str | None:
    names = {_letters(each): each for each in known}
    long_first = sorted(names, key=len, reverse=True)
    parts = {part: names[letters] for letters in long_first for part in letters.split("_") if len(part) >= _LONG}
    wrong = _letters(name)
    elsewhere = _ELSEWHERE.get(wrong)
    if elsewhere is not None and elsewhere not in names:
        elsewhere = _ELSEWHERE.get(elsewhere)
    if elsewhere in names:
        return names[elsewhere]
    for named in (names, parts):
        if near := get_close_matches(wrong, named, n=4, cutoff=0.65):
            return named[max(near, key=lambda each: _nearness(wrong, each))]
    return None


def _letters(name: object) -> str:
    return str(name)[:80].lower().replace("-", "_")


def _nearness(wrong: str, known: str) -> tuple[int, float, int]:
    """Similarity of two names.

    ``qpn`` and ``qmp`` suggest ``qpm``; ``pth`` suggests ``path``, not ``qph``.
    """
    shared = (Counter(wrong) & Counter(known)).total() - abs(len(wrong) - len(known))
    alike = SequenceMatcher(None, wrong, known).ratio()
    return shared, alike, -sum(abs(ord(one) - ord(other)) for one, other in zip(wrong, known))


def expected_of(name: object, known: Iterable[str], prefix: str = "") -> str:
    """Return the probable meaning, and valid names after ``prefix``."""
    names = list(known)
    near = meant(name, names)
    guess = "" if near is None else f"did you mean {prefix + near!r}? "
    guess += _TEXT if _ELSEWHERE.get(_letters(name)) == "limits" else ""
    return f"{guess}expected one of {listed([prefix + each for each in names], most=_MOST if len(names) <= _MOST else MOST)}"


class _Lacking:
    """A name that doesn't exist here. Access raises an error that shows the alternative."""

    def __init__(self, of: str, name: str, instead: str) -> None:
        self._said = f"{of} has no {name!r}, expected {instead}"
        self.__doc__ = f"Not here, expected {instead}."

    def __get__(self, instance: object, owner: type) -> NoReturn:
        raise AttributeError(self._said)


def lacking(of: str, instead: Mapping[str, str]) -> Callable[[Kind], Kind]:
    """Add names of other libraries to a class, each with its alternative. Hidden from type checkers and ``dir``."""

    def decorate(kind: Kind) -> Kind:
        for name, cure in instead.items():
            setattr(kind, name, _Lacking(of, name, cure))
        setattr(kind, "__dir__", lambda self: [name for name in object.__dir__(self) if name not in instead])  # noqa: B010
        return kind

    return decorate


def not_of(module: str, instead: Mapping[str, str]) -> Callable[[str], NoReturn]:
    """Return a module's ``__getattr__`` (PEP 562) for names of other libraries."""

    def missing(name: str) -> NoReturn:
        if name in instead:
            raise ImportError(f"{name} is not in {module}, expected {instead[name]}")
        raise AttributeError(f"module {module!r} has no attribute {name!r}")

    return missing


@contextmanager
def extra(name: str, *packages: str) -> Iterator[None]:
    """Add a ``pip install`` command to the error for missing ``packages``."""
    try:
        yield
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in packages:
            raise
        missing = next((package for package in packages if not _is_there(package)), packages[0])
        message = f"{missing} is not installed, expected: pip install 'limitgate[{name}]'"
        raise ModuleNotFoundError(message, name=missing, path=error.path) from error


def require(package: str) -> None:
    if not _is_there(package):
        raise ModuleNotFoundError(f"No module named {package!r}", name=package)


def _is_there(package: str) -> bool:
    with suppress(ModuleNotFoundError):
        return find_spec(package) is not None
    return False
