"""Under faults at random nothing hangs, no wrong weight is served, and every fault is accounted for."""

from __future__ import annotations

from pathlib import Path

import pytest
from soak import soak


@pytest.mark.parametrize(("engine", "commit", "versions"), [("shm", "staged", 20), ("gloo", "in_place", 16)])
def test_a_soak_ends_with_no_hang_no_wrong_weight_and_every_fault_reported(
    tmp_path: Path, engine: str, commit: str, versions: int
) -> None:
    options = {"filesystem": {"path": str(tmp_path / "store")}}.get(engine, {})
    result = soak(engine, options, versions=versions, seed=1, rate=0.02, log=tmp_path / "faults.jsonl", commit=commit)
    assert not result.wrong, str(result)
    assert not result.unaccounted, str(result)
    assert result.engine_faults, str(result)
    assert result.recovered, str(result)
