"""RESULTS.md is what the committed baselines give, and marks what became slower."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from weightlane.cli.bench.report.bench_report import BenchReport

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(scope="module")
def program() -> ModuleType:
    spec = importlib.util.spec_from_file_location("benchmark_results", ROOT / "benchmarks" / "results.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look there
    spec.loader.exec_module(module)
    return module


def spread(value: float) -> dict[str, float]:
    return {"median": value, "min": value, "max": value}


def report(*, latency_s: float = 0.4, rollout_s: float = 0.2, trainer_s: float = 1e-4) -> dict[str, Any]:
    """A committed report with one row, in which these seconds stand."""
    plain = json.loads(next((ROOT / "benchmarks/baselines").glob("*/*-shm-full.json")).read_text())
    measured = {
        "latency_s": latency_s,
        "rollout_blocked_s": rollout_s,
        "trainer_blocked_s": trainer_s,
        "raw_transport_s": 0.4,
    }
    row = plain["rows"][0] | {name: spread(seconds) for name, seconds in measured.items()}
    return plain | {
        "setup": plain["setup"] | {"model": "m"},
        "limits": dict.fromkeys(plain["limits"], spread(0.2)),
        "blocking": dict.fromkeys(plain["blocking"], spread(1.0)),
        "rows": [row],
        "unavailable": {"nccl": "no CUDA device"},
        "notes": ["not quiet"],
    }


def keep(folder: Path, machine: str, date: str, plain: dict[str, Any]) -> None:
    path = folder / machine / f"{date}-m.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(BenchReport.model_validate(plain).model_dump_json())


def test_the_committed_results_are_those_of_the_committed_baselines(program: ModuleType) -> None:
    assert program.main(["--check"]) == 0, "run python benchmarks/results.py"
    assert program.read_baselines(ROOT / "benchmarks" / "baselines")


def test_a_ratio_that_grew_by_more_than_a_fifth_is_marked(program: ModuleType, tmp_path: Path) -> None:
    keep(tmp_path, "a", "2026-01-01", report())
    keep(tmp_path, "a", "2026-01-02", report(latency_s=0.5, rollout_s=0.23))
    keep(tmp_path, "b", "2026-01-03", report(latency_s=4.0))
    text = program.results(program.read_baselines(tmp_path))
    assert text.count("regressed**") == 1
    assert "**Regressed: 1** of the ratios" in text
    assert "| 500 | **1.25 regressed** (was 1.00) |" in text
    assert "| 230 | 1.15 |" in text
    assert text.index("### 2026-01-02") < text.index("### 2026-01-01") < text.index("## b, m")
    assert "nccl: no CUDA device" in text
    assert "Note: not quiet" in text


def test_the_trainer_counts_only_above_a_hundredth_of_the_blocking_way(program: ModuleType, tmp_path: Path) -> None:
    keep(tmp_path, "a", "2026-01-01", report(trainer_s=1e-4))
    for now_s, marked in ((0.009, False), (0.011, True)):
        keep(tmp_path, "a", "2026-01-02", report(trainer_s=now_s))
        assert ("egressed" in program.results(program.read_baselines(tmp_path))) is marked
