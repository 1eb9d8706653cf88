"""The benchmark of the control plane: real messages of participants in other processes, and it notices what is too slow."""

from __future__ import annotations

import json
import signal
import sys
from pathlib import Path
from types import ModuleType

import pytest
from waiting import HANG_S


@pytest.mark.parametrize(
    ("sizes", "most_s", "code"),
    [
        ("--participants 2 --tensors 3", 0.0, 1),
        pytest.param("--participants 2 12 --tensors 3 300", 1e9, 0, marks=pytest.mark.exhaustive),
    ],
)
def test_every_size_is_a_row_messages_grow_with_participants_and_not_with_tensors_and_slow_versions_are_reported(
    sizes: str,
    most_s: float,
    code: int,
    control_plane: ModuleType,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(signal, "signal", lambda *_: None)  # the handler would stay in this process
    monkeypatch.setattr(control_plane, "LIMIT_S", HANG_S)
    monkeypatch.setattr(control_plane, "MOST_VERSION_S", most_s)
    monkeypatch.setattr(control_plane, "MOST_SESSION_S", 1e9)
    to = tmp_path / "control.json"
    command = [*sizes.split(), "--versions", "2", "--sessions", "1", "--json", str(to)]
    assert control_plane.main(command) == code
    rows = json.loads(to.read_text())["rows"]
    assert (rows[0]["participants"], rows[0]["tensors"]) == (2, 3)
    assert all(len(row["version_s"]) == 2 and len(row["session_s"]) == 1 for row in rows)
    for participants in {row["participants"] for row in rows}:
        messages = [row["version_messages"] for row in rows if row["participants"] == participants]
        assert max(messages) - min(messages) <= 2
    assert 0 < rows[-1]["version_messages"] <= 9 * rows[-1]["participants"], "everyone says and hears a few things"
    shown = capsys.readouterr().out
    assert all(cell in shown for row in rows for cell in control_plane.cells(row))
    assert ("TOO SLOW" in shown) is (code == 1)


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
