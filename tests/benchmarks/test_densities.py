"""The benchmark of `auto`: what it compares, and that it notices wrong bits."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest
from waiting import HANG_S

from weightlane.cli.bench.processes.processes import Processes
from weightlane.cli.bench.workload.workload import named_workload


@pytest.mark.exhaustive
def test_every_density_has_all_three_what_auto_made_of_it_and_whether_every_bit_was_right(
    densities: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    ask = Processes.every

    def one_bit_off_at_last(processes: Processes, method: str, *arguments: Any, **more: Any) -> list[Any]:
        first, *others = ask(processes, method, *arguments, **more)
        wrong = method == "crc" and said[-1] == "gloo, density 1"
        return [first, *(crc ^ 1 for crc in others)] if wrong else [first, *others]

    monkeypatch.setattr(Processes, "every", one_bit_off_at_last)
    report = densities.run(
        named_workload("tiny"),
        engines=["shm", "gloo"],
        densities=[0.01, 1.0],
        receivers=1,
        warm=1,
        versions=3,
        timeout_s=HANG_S,
        say=said.append,
    )
    assert [(row["engine"], row["density"], row["verified"]) for row in report["rows"]] == [
        ("shm", 0.01, True),
        ("shm", 1.0, True),
        ("gloo", 0.01, True),
        ("gloo", 1.0, False),
    ]
    assert not report["verified"]
    payload = report["payload_bytes"]
    for row in report["rows"]:
        assert all(row["latency_s"][codec]["median"] > 0 for codec in densities.CODECS)
        assert row["ratio_measured"] > 0
        assert row["ratio_by_choice"] > 0
        assert len(row["chosen"]) == len(row["reasons"]) == 4
        assert row["delta_wire_bytes"] >= payload if row["density"] == 1 else row["delta_wire_bytes"] < payload / 10
    lines = densities.text(report).splitlines()
    assert len(lines) == 4 + len(report["rows"])
    assert [line.endswith("NOT VERIFIED") for line in lines] == [*[False] * 6, True, False]


def test_auto_is_compared_with_the_better_one_of_the_others_and_by_what_it_chose(densities: ModuleType) -> None:
    steps = [
        {
            codec: densities._Carried(seconds, 8, auto if codec == "auto" else codec, "a reason")
            for codec, seconds in (("dense", 0.2), ("delta", 0.1), ("auto", 0.3))
        }
        for auto in ("dense", "dense", "dense", "delta")
    ]
    row = densities._figures(0.01, steps, 1, verified=True)
    assert (row["best"], row["chosen"], row["left_out"]) == ("delta", ["dense", "dense", "dense", "delta"], 1)
    assert (row["ratio_measured"], row["ratio_by_choice"]) == (pytest.approx(3.0), pytest.approx(2.0))
