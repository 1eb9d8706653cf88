"""The benchmark of the control plane: real messages of participants in other processes, and it notices what is too slow."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from types import ModuleType

import pytest
from waiting import HANG_S


def test_a_size_is_a_row_of_real_messages_and_slow_versions_are_reported(
    control_plane: ModuleType,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(signal, "signal", lambda *_: None)  # the handler would stay in this process
    monkeypatch.setattr(control_plane, "LIMIT_S", HANG_S)
    monkeypatch.setattr(control_plane, "MOST_VERSION_S", 0.0)
    to = tmp_path / "control.json"
    size = ["--participants", "2", "--tensors", "3", "--versions", "2", "--sessions", "1"]
    assert control_plane.main([*size, "--json", str(to)]) == 1
    (row,) = json.loads(to.read_text())["rows"]
    assert (row["participants"], row["tensors"]) == (2, 3)
    assert (len(row["version_s"]), len(row["session_s"])) == (2, 1)
    assert 0 < row["version_messages"] <= 9 * row["participants"], "everyone says and hears a few things"
    shown = capsys.readouterr().out
    assert all(cell in shown for cell in control_plane.cells(row))
    assert "TOO SLOW" in shown
