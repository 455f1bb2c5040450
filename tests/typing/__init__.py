"""The public API as typed code: checked by mypy, never run. What must be rejected says so by the error it is rejected with."""
