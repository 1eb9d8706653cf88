"""The benchmark of planning: what it measures, and that it notices a plan that moves too much."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest


@pytest.mark.exhaustive
def test_each_case_is_planned_in_its_own_process_and_shown_in_one_row(
    plan_scale: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(signal, "signal", lambda *_: None)  # the handler would stay in this process
    to = tmp_path / "plan.json"
    assert plan_scale.main(["--case", "30b", "--rounds", "2", "--json", str(to)]) == 0
    report = json.loads(to.read_text())
    (row,) = report["rows"]
    assert report["verified"]
    assert len(row["wall_s"]) == len(row["cpu_s"]) == 2
    assert all(cpu_s > 0 for cpu_s in row["cpu_s"])
    assert row["peak_mib"] >= row["before_planning_mib"] > 50
    assert row["tensors"] == 18867
    assert row["predicted"]["direct_s"] >= row["predicted"]["bound_s"]
    shown = capsys.readouterr().out.splitlines()
    assert len(shown) == 2
    assert all(cell in shown[1] for cell in plan_scale.cells(row))
    assert plan_scale.markdown(report).count("\n") == 2
    assert plan_scale.text(report | {"verified": False}).splitlines()[-1].startswith("NOT VERIFIED")


def test_a_plan_that_moves_more_than_is_needed_is_not_verified(
    plan_scale: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    explained = plan_scale.plan_report

    def one_byte_more(*arguments: Any, **settings: Any) -> dict[str, Any]:
        report: dict[str, Any] = explained(*arguments, **settings)
        return report | {"crossing_bytes": report["crossing_bytes"] + 1}

    monkeypatch.setattr(plan_scale, "plan_report", one_byte_more)
    assert not plan_scale.measure_case("30b", 1, 50e9)["verified"]
