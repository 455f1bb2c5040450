"""`limitgate schema`."""

from __future__ import annotations

import json

from click.testing import CliRunner

from handbook.schema import schema
from limitgate.command.group import limitgate


def test_the_schema_is_printed_as_one_json_value() -> None:
    """As it is installed with the package."""
    result = CliRunner().invoke(limitgate, ["schema"])
    assert result.exit_code == 0
    assert json.loads(result.stdout) == json.loads(json.dumps(schema()))
