"""From FSDP2 and Megatron ranks, straight to replicas of every kind: a part of the matrix that `matrix.py` goes through."""

from __future__ import annotations

from pathlib import Path

import pytest
from json_program import Program
from matrix import Case, ModelRun, model_run
from running_worker import RecordingWorker
from tiny_models import load_tensors

from weightlane.rollout.layout.offline.needs_cache import CACHE_ENV
from weightlane.rollout.layout.offline.planned_needs import planned_needs

pytestmark = [pytest.mark.vllm, pytest.mark.megatron, pytest.mark.slow]

PART = {
    "qwen3-moe": [
        Case("fsdp2 tp2", "gloo", "delta"),
        Case("megatron ep2", "shm", "dense"),
        Case("megatron tp2", "filesystem", "delta"),
    ],
    "mla-moe": [
        Case("fsdp2", "gloo", "delta"),
        Case("megatron ep2", "shm", "dense"),
    ],
    "qwen3 tied": [
        Case("megatron pp2", "shm", "delta"),
        Case("megatron tp2", "gloo", "dense"),
        Case("megatron tp2 pp2", "gloo", "delta"),
    ],
}


SPLITS = {"mla-moe": [(1, False), (2, True)]}
"""Replicas of the model that `make test` runs: with one rank, and with two that have whole experts. Others have all kinds."""


@pytest.mark.usefixtures("forked_answers")
@pytest.mark.parametrize(
    "model", ["mla-moe", *(pytest.param(each, marks=pytest.mark.exhaustive) for each in ("qwen3-moe", "qwen3 tied"))]
)
def test_every_rollout_holds_and_computes_exactly_what_the_trainer_has(
    model: str, process: Program, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(CACHE_ENV, "off")
    with model_run(model, tmp_path, SPLITS.get(model)) as run:
        for case in PART[model]:
            run.run(case)
            if case.engine != "filesystem":
                asked = run.asked
        for worker in run.workers:
            run.runner.run(check_loading(run, worker, process))
        run.runner.run(run.check_tokens(run.path))
        worker = run.workers[-1]
        planned = planned_needs(worker.config, run.path)
    assert [need and need.digest for need in planned.ranks] == [asked[f"{worker.name}/{rank}"] for rank in range(2)]


async def check_loading(run: ModelRun, worker: RecordingWorker, process: Program) -> None:
    """Commits were copies to where a model that is built for each rank alone says; vLLM's own reloading leaves the same."""
    probe = worker._engine.running.collective_rpc
    world, divided = worker.config.tensor_parallel, worker.config.expert_parallel
    assert await probe("probe_way") == [["traced", ""]] * world
    for rank, layout in enumerate(await probe("probe_layout")):
        assert layout == process.call("rank_layout", str(run.path), "float32", rank, world, divided)
    await probe("probe_reload", args=(str(run.path),))
    await worker.check(load_tensors(run.path))
