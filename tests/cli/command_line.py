"""Runs `weightlane` in this process, as a user would."""

from __future__ import annotations

import json
from typing import Any

from typer.testing import CliRunner, Result

from weightlane.cli import main


def run(*arguments: str, columns: int = 160) -> Result:
    return CliRunner().invoke(main.app, list(arguments), env={"COLUMNS": str(columns)})


def report(*arguments: str) -> Any:
    """Run a command with ``--json``, check that it succeeds, and return the parsed output."""
    result = run(*arguments, "--json")
    assert result.exit_code == 0, result.stderr
    return json.loads(result.stdout)


def assert_refused(message: str, *arguments: str) -> None:
    """The command ends with exit code 2 and one line with `message` on stderr."""
    result = run(*arguments)
    assert (result.exit_code, result.stdout) == (2, "")
    (line,) = result.stderr.splitlines()
    assert line.startswith("error: ")
    assert message in line, line
