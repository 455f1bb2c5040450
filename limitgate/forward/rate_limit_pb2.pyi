# Types of what limitgate.forward.rate_limit_service uses of the messages in rate_limit.proto. Written by hand.

from collections.abc import ItemsView, Sequence
from typing import ClassVar, Self

class _Message:
    @classmethod
    def FromString(cls, data: bytes) -> Self: ...  # noqa: N802 - as protobuf has it
    def SerializeToString(self) -> bytes: ...  # noqa: N802
    def HasField(self, name: str) -> bool: ...  # noqa: N802

class _Count(_Message):
    value: int

class _Duration(_Message):
    def FromMilliseconds(self, milliseconds: int) -> None: ...  # noqa: N802

class Descriptor(_Message):
    class Entry(_Message):
        key: str
        value: str

    entries: Sequence[Entry]
    hits_addend: _Count

class Request(_Message):
    domain: str
    descriptors: Sequence[Descriptor]
    hits_addend: int

class Header(_Message):
    def __init__(self, *, key: str, value: str) -> None: ...

class _Units:
    def items(self) -> ItemsView[str, int]: ...

class Response(_Message):
    OK: ClassVar[int]
    OVER_LIMIT: ClassVar[int]

    class Limit(_Message):
        NONE: ClassVar[int]
        Unit: ClassVar[_Units]
        requests_per_unit: int
        unit: int
        name: str

    class Status(_Message):
        current_limit: Response.Limit
        limit_remaining: int
        duration_until_reset: _Duration
        def __init__(self, *, code: int) -> None: ...

    def __init__(
        self,
        *,
        overall_code: int,
        statuses: Sequence[Response.Status],
        response_headers_to_add: Sequence[Header],
        raw_body: bytes,
    ) -> None: ...
