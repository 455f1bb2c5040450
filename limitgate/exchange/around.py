"""Mistakes in how middleware is put around an application: none is given, or the middleware is dropped where it is made."""

from __future__ import annotations

import inspect
import sys
from opcode import opmap
from types import CodeType, FrameType
from typing import Any, ClassVar, Self

from limitgate.gate.gate import Gate
from limitgate.messages.diagnostics import Diagnosis
from limitgate.messages.suggestions import lacking

OF_LIMITERS = {
    "check": "nothing, as requests are checked before the application runs; in its midst limitgate.Limiter.hit",
    "current_limit": "usage(request) of limitgate, under ASGI await ausage(request)",
    "enabled": "the option enabled; in tests off() of limitgate.testing",
    "exempt": "@exempt of limitgate",
    "limit": "@limit('5/minute') of limitgate, below the route decorator",
    "request_filter": "Rule('monitoring', exempt=True, when=...) among the rules",
    "reset": "reset() of limitgate.testing in tests, limitgate.Limiter.bucket(...).reset() for one client",
    "shared_limit": "@limit('10/minute', name='database') of limitgate, below the route decorator",
}
"""What stands for the attributes of other limiters that are made of an application."""


@lacking("LimitGate", OF_LIMITERS)
class Around:
    """Base of middleware that is made of an application and kept in its place."""

    gate: Gate | None = None
    PUT_AROUND: ClassVar[str]
    """Code that puts it around an application."""
    _made_by: CodeType
    """Code that has made it."""

    def __new__(cls, *given: Any, **options: Any) -> Self:
        """Raise `TypeError` where no application is given: the middleware is mostly wanted itself then, and not one of it."""
        if not given and "app" not in options and "app" in inspect.signature(cls.__init__).parameters:
            raise TypeError(f"{cls.__name__} was given no application, expected {cls.PUT_AROUND}")
        made = super().__new__(cls)
        made._made_by = sys._getframe(1).f_code  # noqa: SLF001 - as logging does
        return made

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        """Take it apart for `copy`: the copy is around the same application, by the same gate."""
        return object.__new__, (type(self),), vars(self)

    def __del__(self) -> None:
        """Log that it was never used, if it is dropped by the code that has made it as a statement by itself (LG039)."""
        if self.gate is None or self.gate.store_health.has_answered or sys.is_finalizing():
            return
        dropping: FrameType | None = sys._getframe().f_back  # noqa: SLF001
        if dropping is None or dropping.f_code is not self._made_by:
            return
        if dropping.f_code.co_code[dropping.f_lasti] == opmap["POP_TOP"]:
            Diagnosis.DROPPED.log(type(self).__name__, self.PUT_AROUND)
