"""The benchmark of the control plane: real messages of participants in other processes, and it notices what is too slow."""

from __future__ import annotations

import json
import signal
import sys
from pathlib import Path
from types import ModuleType

import pytest


def test_every_size_is_a_row_and_what_a_version_costs_grows_with_participants_and_not_with_tensors(
    control_plane: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(signal, "signal", lambda *_: None)  # the handler would stay in this process
    monkeypatch.setattr(control_plane, "MOST_VERSION_S", 1e9)
    monkeypatch.setattr(control_plane, "MOST_SESSION_S", 1e9)
    to = tmp_path / "control.json"
    command = "--participants 2 12 --tensors 3 300 --versions 3 --sessions 2 --json"
    assert control_plane.main([*command.split(), str(to)]) == 0
    rows = json.loads(to.read_text())["rows"]
    assert [(row["participants"], row["tensors"]) for row in rows] == [(2, 3), (2, 300), (12, 3), (12, 300)]
    assert all(len(row["version_s"]) == 3 and len(row["session_s"]) == 2 for row in rows)
    two, _, twelve, large = (row["version_messages"] for row in rows)
    assert two < twelve <= 9 * 12, "every participant says and hears a few things"
    assert large == pytest.approx(twelve, abs=2)
    shown = capsys.readouterr().out.splitlines()
    assert len(shown) == 2 + len(rows)
    assert all(cell in shown[2] for cell in control_plane.cells(rows[0]))


def test_what_takes_too_long_is_said_and_is_an_error(
    control_plane: ModuleType, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    monkeypatch.setattr(control_plane, "MOST_VERSION_S", 0.0)
    command = "--participants 2 --tensors 3 --versions 1 --sessions 1"
    assert control_plane.main(command.split()) == 1
    assert "TOO SLOW" in capsys.readouterr().out


def test_participants_that_never_join_are_not_waited_for_without_end(
    control_plane: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    never_joins = tmp_path / "never_joins"
    never_joins.write_text("#!/bin/sh\nexec sleep 1000000\n")
    never_joins.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(never_joins))
    monkeypatch.setattr(control_plane, "LIMIT_S", 0.2)
    assert control_plane.main(["--participants", "2", "--tensors", "3", "--versions", "1", "--sessions", "1"]) == 2
    assert "a process of participants to join" in capsys.readouterr().err
