"""The benchmark of `auto`: what it compares, and that it notices wrong bits."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest

from weightlane.sync.bench.processes import Processes
from weightlane.sync.bench.workload import named_workload


@pytest.fixture
def densities(load_benchmark: Callable[[str], ModuleType]) -> ModuleType:
    return load_benchmark("densities")


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
        timeout_s=30.0,
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
        medians = {codec: row["latency_s"][codec]["median"] for codec in densities.CODECS}
        best = min(medians["dense"], medians["delta"])
        assert medians[row["best"]] == best > 0
        assert row["ratio_measured"] == pytest.approx(medians["auto"] / best)
        assert row["ratio_by_choice"] in [pytest.approx(medians[codec] / best) for codec in ("dense", "delta")]
        assert len(row["chosen"]) == len(row["reasons"]) == 4
        assert row["delta_wire_bytes"] >= payload if row["density"] == 1 else row["delta_wire_bytes"] < payload / 10
    assert report["worst_measured"] == max(row["ratio_measured"] for row in report["rows"])
    lines = densities.text(report).splitlines()
    assert len(lines) == 4 + len(report["rows"])
    assert [line.endswith("NOT VERIFIED") for line in lines] == [*[False] * 6, True, False]


def test_the_model_between_is_known_here_only(densities: ModuleType) -> None:
    assert densities.workload_named(densities.MIDDLE).nbytes == 32 * 2 * 2048**2
    assert densities.workload_named("tiny") == named_workload("tiny")
