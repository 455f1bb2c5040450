"""`limitgate schema`."""

from __future__ import annotations

import json

from handbook.schema import schema
from limitgate.command.group import limitgate
from tests.support.command_line import CliRunner


def test_the_schema_is_printed_as_one_json_value() -> None:
    """As it is installed with the package."""
    result = CliRunner().invoke(limitgate, ["schema"])
    assert result.exit_code == 0
    assert json.loads(result.stdout) == json.loads(json.dumps(schema()))
