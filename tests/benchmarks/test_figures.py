"""Figures are computed as their page says, wrong bits are noticed, and the page shows the committed results."""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]


def test_the_page_is_what_the_committed_results_give(figures: ModuleType) -> None:
    text = figures.PAGE.read_text()
    assert text == figures.page(text), "run python -m benchmarks.figures"
    names = ["bench-*", "versions*", *(name.removeprefix("make ") for name in figures.TABLES)]
    assert sum(len(figures.results(name)) for name in names) == len([*figures.RESULTS.glob("*/*")]), "one is not shown"


def test_a_row_of_the_bench_has_the_limits_of_its_own_run_and_says_if_bits_were_wrong(figures: ModuleType) -> None:
    report = json.loads(next(figures.RESULTS.glob("*/bench-*-shm-off-*.json")).read_text())
    row = report["rows"][0]
    row["latency_s"]["median"], row["raw_transport_s"]["median"] = 0.5, 0.4
    assert "| 500 | 400 | 1.25 | 100.00% |" in figures.bench([report])
    assert "NOT VERIFIED" not in figures.bench([report])
    row["verified"] = False
    assert "NOT VERIFIED" in figures.bench([report])


def test_a_changed_element_is_one_with_any_other_bit_on_the_wire_and_tied_weights_count_once(
    density: ModuleType,
) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 4, bias=False), torch.nn.Linear(4, 4, bias=False))
    model[1].weight = model[0].weight
    weight = model[0].weight.detach().view(-1)
    weight.copy_(torch.tensor([0.0, float("nan"), 1.0, 1.0, 1e-39, *[0.5] * 11]))
    before = density.wire_bits(model)
    assert sum(tensor.numel() for tensor in before) == 16
    weight[0] = -0.0
    weight[2] = 1.001  # rounds to the same bfloat16
    weight[3] = 1.01
    assert density.changed_share(before, density.wire_bits(model)) == 2 / 16
    assert density.changed_share(before, before) == 0.0


def test_costs_of_versions_are_medians_and_the_share_is_of_the_time_just_before(versions: ModuleType) -> None:
    """A machine that slows down during the benchmark does not count."""
    costs = [versions.Cost(0.001 * turn, 0.002 * turn, 0.01 * turn) for turn in range(1, 22)]
    gaps = [0.001 * number for number in range(1, 102)]
    turns = [
        versions.Turn(
            costs, versions.Decoding(alone, gaps), versions.Decoding(meanwhile, [2 * gap for gap in gaps]), 5.0
        )
        for alone, meanwhile in ((100.0, 90.0), (50.0, 45.0), (10.0, 8.0))
    ]
    row = versions.row_of("shm", turns)
    assert row["versions"] == 63
    assert row["trainer_blocked_s"] == {"median": 0.011, "min": 0.001, "max": 0.021, "p95": pytest.approx(0.02)}
    assert row["share"] == {"median": 0.9, "min": 0.8, "max": 0.9}
    settings = {"payload_bytes": 10**6, "requests": 64, "kv": "keep", "threads": 1, "between_s": 0.1}
    shown = versions.text({**settings, "machine": {"cores": 2}, "rows": [row]})
    assert (
        "| shm | 63 | 11.0 (20.0) | 22.0 (40.0) | 110.0 (200.0) | 0.90 (0.80 to 0.90) | 51 / 100 / 101 | 102 / 200 / 202 | 5 |"
        in shown
    )


@pytest.mark.parametrize("wrong_turn", [None, 3])
def test_the_bits_of_every_turn_of_versions_are_compared(versions: ModuleType, wrong_turn: int | None) -> None:
    turns: list[str] = []

    class Measured:
        async def turn(self, method: str) -> Any:
            return versions.Turn(
                [versions.Cost(1.0, 2.0, 3.0 if method == "shm" else 6.0)] * 3, *[versions.Decoding(1.0, [])] * 2, 0.0
            )

        async def differing(self) -> list[str]:
            turns.append("turn")
            return ["weight"] if len(turns) - 1 == wrong_turn else []

    found, verified = asyncio.run(versions.take_turns(Measured(), argparse.Namespace(engine=["shm"], rounds=2)))
    assert verified is (wrong_turn is None)
    assert len(turns) == 4
    latencies = {method: [cost.latency_s for turn in each for cost in turn.costs] for method, each in found.items()}
    assert latencies == {"shm": [3.0] * 6, versions.BLOCKING: [6.0] * 6}


def test_a_slow_link_that_cannot_be_made_is_refused_with_what_is_missing(tmp_path: Path) -> None:
    for program in ("unshare", "ip", "weightlane"):
        (tmp_path / program).symlink_to("/bin/true")
    script = ["/bin/sh", str(ROOT / "benchmarks/sync/slow-link.sh"), "--model", "tiny"]
    done = subprocess.run(script, env={"PATH": str(tmp_path)}, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (2, "slow-link: tc not found (Debian: util-linux, iproute2)\n")
