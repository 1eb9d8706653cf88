"""From FSDP2 and Megatron ranks, whatever their layout, straight to replicas of every kind: bit for bit, and exact tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from json_program import Program
from quantised_reference import restored
from running_replica import PROMPT, RecordingReplica, probed_replica, started
from tiny_models import (
    add_tokenizer,
    copy_with,
    is_greedy,
    load_tensors,
    make_mla_moe,
    make_qwen3,
    make_qwen3_moe,
)
from trainer_process import nudge
from trainer_ranks import Trainers
from zoo_kind import make
from zoo_models import KINDS

from weightlane.rollout.layout.offline.needs_cache import CACHE_ENV
from weightlane.rollout.layout.offline.planned_needs import planned_needs
from weightlane.sync.config import CodecPolicy, Quantise

pytestmark = [pytest.mark.vllm, pytest.mark.megatron, pytest.mark.slow]

VOCAB = 300
"""Needs padding in vLLM and in megatron-core, and gives two trainer ranks an uneven part of a fused tensor."""
EVERY = 97
"""One element in so many changes from version to version."""
_WITH_EXPERTS = {"expert_parallel": 2, "sequence_parallel": True}
TRAINERS: dict[str, tuple[int, dict[str, Any]]] = {
    "fsdp2": (2, {"engine": "fsdp2"}),
    "fsdp2 tp2": (2, {"engine": "fsdp2", "fsdp2": {"tensor_parallel": 2}}),
    "megatron ep2": (2, {"engine": "megatron", "megatron": {"expert_parallel": 2}}),
    "megatron tp2 ep2": (2, {"engine": "megatron", "megatron": {"tensor_parallel": 2, **_WITH_EXPERTS}}),
    "megatron tp2 pp2": (4, {"engine": "megatron", "megatron": {"tensor_parallel": 2, "pipeline_parallel": 2}}),
}
"""Number of ranks, and the trainer's configuration."""
GPT_OSS = replace(KINDS["gpt-oss"], sizes=KINDS["gpt-oss"].sizes | {"max_position_embeddings": 1024, "head_dim": 32})
MODELS: dict[str, Callable[[Path], Path]] = {
    "mla-moe": lambda path: make_mla_moe(path, seed=3, vocab=VOCAB),
    "qwen3-moe": lambda path: make_qwen3_moe(path, seed=3, vocab=VOCAB),
    "qwen3 tied": lambda path: make_qwen3(path, seed=3, tied=True, vocab=VOCAB),
    "gpt-oss": lambda path: make(GPT_OSS, path, seed=3, dtype=torch.float32),
}


@dataclass(frozen=True, slots=True)
class Case:
    """One connection: a trainer, an engine, a codec, a format."""

    trainer: str
    engine: str
    codec: CodecPolicy = "dense"
    quantise: Quantise = "none"


@dataclass
class ModelRun:
    """One model in a running replica for each of `splits`, and trainers on demand."""

    stack: ExitStack
    path: Path
    splits: Sequence[tuple[int, bool]]
    """Ranks of each replica, and whether its experts are divided between them."""
    as_loaded: bool
    """Whether parameters are compared with those of an ordinary load, since `check_ranks` does not know the model."""
    version: int = 0
    asked: dict[str, str] = field(default_factory=dict)
    """Digest of what each rollout rank asked for in the last case; empty where it asked for everything."""

    def __post_init__(self) -> None:
        self.replicas = [
            probed_replica(
                f"rollout-{number}",
                self.path,
                in_engine=ranks == 1,
                dtype="float32",
                tensor_parallel=ranks,
                expert_parallel=experts,
            )
            for number, (ranks, experts) in enumerate(self.splits)
        ]
        self.runner = self.stack.enter_context(started(*self.replicas))
        self._trainers: dict[int, Trainers] = {}

    def run(self, case: Case) -> None:
        """Carry two versions over a connection of its own. Raises AssertionError if a replica has something else."""
        ranks, config = TRAINERS[case.trainer]
        if ranks not in self._trainers:
            self._trainers[ranks] = self.stack.enter_context(closing(Trainers(ranks)))
        trainers = self._trainers[ranks]
        trainers.call("setup", str(self.path), config)
        self.runner.run(self._versions(case, trainers))

    async def _versions(self, case: Case, trainers: Trainers) -> None:
        weights = {name: tensor.clone() for name, tensor in load_tensors(self.path).items()}
        store = self.path.with_name(f"store-{self.version}")
        async with trainers.publishing(
            self.replicas, case.engine, store, quantise=case.quantise, codec=case.codec
        ) as coordinator:
            self.asked = {name: hello.need for name, hello in coordinator._queue.hellos.items()}
            for _ in range(2):
                self.version += 1
                trainers.call("nudge", self.version, EVERY)
                for tensor in weights.values():
                    tensor.add_(nudge(torch.arange(tensor.numel()).view(tensor.shape), self.version, EVERY))
                trainers.call("publish", self.version)
                report = await coordinator.sync(self.version)
                served = weights if case.quantise == "none" else left_by_fp8(weights)
                if not self.as_loaded:
                    for replica in self.replicas:
                        await replica.check(served)
            assert report.codec == case.codec, report.codec_reason
        exported = copy_with(served, self.path, self.path.with_name(f"export-{self.version}"))
        if self.as_loaded:
            await self.check_against_a_load(exported)
        await self.check_tokens(exported)

    async def check_against_a_load(self, model: Path) -> None:
        """Check that every parameter of the replica is that of a replica that was started from `model`, bit for bit."""
        (replica,) = self.replicas
        fresh = probed_replica("fresh", model, in_engine=True, dtype="float32")
        await fresh.start()
        try:
            parameters = [await each._engine.running.collective_rpc("probe_parameters") for each in (replica, fresh)]
        finally:
            await fresh.close()
        assert parameters[0] == parameters[1]

    async def check_tokens(self, model: Path) -> None:
        """Check that every replica decodes what transformers does with the weights of `model`."""
        for replica in self.replicas:
            completion = await replica.generate("fresh", PROMPT, 12, greedy=True)
            assert is_greedy(model, PROMPT, completion.token_ids), f"{replica.name} decodes something else"


def left_by_fp8(weights: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Quantise and restore every projection by the reference quantiser. The trainer ranks' cuts divide its blocks."""
    return {name: restored(tensor) if "_proj" in name else tensor for name, tensor in weights.items()}


@pytest.mark.usefixtures("forked_answers")
@pytest.mark.parametrize(
    ("model", "splits", "cases"),
    [
        pytest.param(
            "mla-moe",
            [(2, True)],
            [
                Case("fsdp2", "gloo", quantise="fp8"),
                Case("fsdp2", "gloo", "delta"),
                Case("megatron ep2", "shm"),
            ],
            id="mla-moe",
        ),
        pytest.param(
            "qwen3-moe",
            [(1, False), (2, False), (2, True)],
            [
                Case("megatron tp2 ep2", "filesystem", "delta"),
                Case("fsdp2 tp2", "gloo", "delta"),
            ],
            id="qwen3-moe",
            marks=pytest.mark.exhaustive,
        ),
        pytest.param(
            "qwen3 tied",
            [(1, False), (2, False)],
            [Case("megatron tp2 pp2", "gloo", "delta")],
            id="qwen3-tied",
            marks=pytest.mark.exhaustive,
        ),
        pytest.param(
            "gpt-oss",
            [(1, False)],
            [Case("megatron tp2 ep2", "shm"), Case("megatron tp2 ep2", "gloo", "delta")],
            id="gpt-oss, whose experts a trainer rank holds transposed",
            marks=pytest.mark.exhaustive,
        ),
    ],
)
def test_every_rollout_holds_and_computes_exactly_what_the_trainer_has(
    model: str,
    splits: list[tuple[int, bool]],
    cases: list[Case],
    process: Program,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv(CACHE_ENV, "off")
    path = MODELS[model](tmp_path / "model")
    add_tokenizer(path, VOCAB)
    with ExitStack() as stack:
        run = ModelRun(stack, path, splits, as_loaded=model == "gpt-oss")
        for case in cases:
            run.run(case)
            if case.engine == "gloo":
                asked = run.asked
        for replica in [] if run.as_loaded else run.replicas:
            run.runner.run(check_loading(run, replica, process))
        replica = run.replicas[-1]
        planned = planned_needs(replica.config, run.path)
    assert [need and need.digest for need in planned.ranks] == [
        asked[f"{replica.name}/{rank}"] for rank in range(splits[-1][0])
    ]


async def check_loading(run: ModelRun, replica: RecordingReplica, process: Program) -> None:
    """Commits were copies to where a model that is built for each rank alone says; vLLM's own reloading leaves the same."""
    probe = replica._engine.running.collective_rpc
    world, divided = replica.config.tensor_parallel, replica.config.expert_parallel
    assert await probe("probe_way") == [["traced", ""]] * world
    for rank, layout in enumerate(await probe("probe_layout")):
        assert layout == process.call("rank_layout", str(run.path), "float32", rank, world, divided)
    await probe("probe_reload", args=(str(run.path),))
    await replica.check(load_tensors(run.path))
