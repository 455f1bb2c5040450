"""What differs between builds of CPython."""

from __future__ import annotations

import sysconfig

import pytest

needs_gil = pytest.mark.skipif(
    bool(sysconfig.get_config_var("Py_GIL_DISABLED")),
    reason="needs the GIL: without it, only the garbage collector frees functions",
)
