"""Every trainer layout into every rollout layout, over every engine and codec: parameters bit for bit, tokens exactly.

    python tests/rollout/matrix.py [--models qwen3 ...] [--trainers fsdp2 ...]

runs all of it, which takes a while, and prints a table; `test_trainers_to_vllm.py` runs a part with every test run.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1] / "e2e"))
sys.path.insert(0, str(Path(__file__).parents[1]))

from fork_server import install
from tiny_models import (
    add_tokenizer,
    greedy_tokens,
    load_tensors,
    make_llama,
    make_qwen3,
    make_qwen3_moe,
    vllm_parameters,
)
from tiny_run import IN_ENGINE
from trainer_process import nudge
from trainer_ranks import Trainers
from waiting import HANG_S

from weightlane.rollout import RolloutConfig, RolloutWorker
from weightlane.sync import Coordinator, Rendezvous, SyncConfig

VOCAB = 300
"""Needs padding in vLLM and in megatron-core, and gives two trainer ranks an uneven part of a fused tensor."""
PROMPT = [5, 6, 7]
EVERY = 97
"""One element in so many changes from version to version."""


@dataclass(frozen=True, slots=True)
class Layout:
    """How a model is split over trainer ranks."""

    ranks: int
    engine: str
    settings: dict[str, Any] = field(default_factory=dict)
    """The engine's own."""
    experts: dict[str, Any] = field(default_factory=dict)
    """What a mixture of experts needs beside them."""
    experts_only: bool = False

    def trainer(self, model: str) -> dict[str, Any]:
        """The trainer's configuration."""
        return {"engine": self.engine, self.engine: self.settings | (self.experts if "moe" in model else {})}


_WITH_TP = {"expert_parallel": 2, "sequence_parallel": True}
TRAINERS = {
    "fsdp2": Layout(2, "fsdp2"),
    "fsdp2 tp2": Layout(2, "fsdp2", {"tensor_parallel": 2}),
    "fsdp2 2 x tp2": Layout(4, "fsdp2", {"tensor_parallel": 2}),
    "megatron tp2": Layout(2, "megatron", {"tensor_parallel": 2}, _WITH_TP),
    "megatron pp2": Layout(2, "megatron", {"pipeline_parallel": 2}),
    "megatron ep2": Layout(2, "megatron", {"expert_parallel": 2}, experts_only=True),
    "megatron tp2 pp2": Layout(4, "megatron", {"tensor_parallel": 2, "pipeline_parallel": 2}, _WITH_TP),
}
MODELS: dict[str, Callable[[Path], Path]] = {
    "qwen3": lambda path: make_qwen3(path, seed=3, vocab=VOCAB),
    "qwen3 tied": lambda path: make_qwen3(path, seed=3, tied=True, vocab=VOCAB),
    "llama": lambda path: make_llama(path, seed=3, vocab=VOCAB),
    "qwen3-moe": lambda path: make_qwen3_moe(path, seed=3, vocab=VOCAB),
}
ENGINES = ("gloo", "shm", "filesystem")
CODECS = ("dense", "delta")


@dataclass(frozen=True, slots=True)
class Case:
    """One connection: a trainer, an engine, a codec."""

    trainer: str
    engine: str
    codec: str


def cases(model: str, trainers: Sequence[str] = tuple(TRAINERS)) -> list[Case]:
    """All that make sense for a model."""
    return [
        Case(trainer, engine, codec)
        for trainer in trainers
        if "moe" in model or not TRAINERS[trainer].experts_only
        for engine in ENGINES
        for codec in CODECS
    ]


@dataclass(frozen=True, slots=True)
class Row:
    """What was seen of a case."""

    case: Case
    codecs: tuple[str, ...]
    """What each version was sent as."""
    sent_bytes: tuple[int, ...]
    latency_s: tuple[float, ...]


class ModelRun:
    """One model in replicas of one rank and of two (and of two with the experts divided), and trainers on demand."""

    def __init__(self, stack: ExitStack, model: str, directory: Path) -> None:
        self._stack = stack
        self._directory = directory
        self._model = model
        self.path = MODELS[model](directory / "model")
        add_tokenizer(self.path, VOCAB)
        self._trainers: dict[int, Trainers] = {}
        self.asked: dict[str, str] = {}
        """Digest of what each rollout rank asked for in the last case; empty where it asked for everything."""
        self._layout: str | None = None
        self._version = 0
        self._weights: dict[str, torch.Tensor] = {}
        splits = [(1, False), (2, False), *([(2, True)] if "moe" in model else [])]
        self.workers = [self._worker(number, *split) for number, split in enumerate(splits)]
        self._runner = stack.enter_context(asyncio.Runner())
        environment = dict(os.environ)
        stack.callback(lambda: self._runner.run(self._all("close")))
        self._runner.run(self._all("start"))
        # Other tests of the session must not find what a replica's own process sets.
        os.environ.clear()
        os.environ.update(environment)

    def _worker(self, number: int, ranks: int, experts: bool) -> RolloutWorker:
        extra: dict[str, Any] = {"worker_extension_cls": "probe_extension.ProbeExtension"}
        if ranks == 1:
            extra["distributed_executor_backend"] = IN_ENGINE
        config = RolloutConfig(
            tensor_parallel=ranks,
            expert_parallel=experts,
            dtype="float32",
            max_model_len=256,
            kv_cache_memory_bytes=32 << 20,
            extra_engine_args=extra,
        )
        return RolloutWorker(f"rollout-{number}", config, self.path)

    async def _all(self, method: str, *arguments: Any) -> None:
        await asyncio.gather(*(getattr(worker, method)(*arguments) for worker in self.workers))

    def _trained_by(self, name: str) -> Trainers:
        layout = TRAINERS[name]
        if layout.ranks not in self._trainers:
            self._trainers[layout.ranks] = self._stack.enter_context(closing(Trainers(layout.ranks)))
        trainers = self._trainers[layout.ranks]
        if self._layout != name:
            trainers.call("setup", str(self.path), layout.trainer(self._model))
            self._layout = name
            self._weights = {key: tensor.clone() for key, tensor in load_tensors(self.path).items()}
        return trainers

    def run(self, case: Case) -> Row:
        """Two versions over a connection of its own; AssertionError where something differs."""
        trainers = self._trained_by(case.trainer)
        placements = trainers.call("placement", "float32")
        store = self._directory / f"store-{self._version}"
        options = {"path": str(store)} if case.engine == "filesystem" else {}
        rendezvous = Rendezvous.host()
        address = rendezvous.address.to_plain()
        trainers.call("connect", address, case.engine, options, "float32", placements, "none", case.codec)
        config = SyncConfig(deadline_s=HANG_S, quorum=1.0)
        coordinator = Coordinator(rendezvous, trainers.names, self.workers, config)
        with closing(coordinator):
            return self._runner.run(self._versions(case, trainers, coordinator, address, options))

    async def _versions(
        self, case: Case, trainers: Trainers, coordinator: Coordinator, address: Any, options: dict[str, Any]
    ) -> Row:
        await self._all("connect", address, case.engine, options)
        await coordinator.connect()
        self.asked = {name: hello.need for name, hello in coordinator._letters.hellos.items()}
        reports = []
        for _ in range(2):
            self._version += 1
            trainers.call("nudge", self._version, EVERY)
            for tensor in self._weights.values():
                tensor.add_(nudge(torch.arange(tensor.numel()).view(tensor.shape), self._version, EVERY))
            trainers.call("publish", self._version)
            reports.append(await coordinator.sync(self._version))
            for worker in self.workers:
                await self._check_parameters(worker)
        assert reports[-1].codec == case.codec, reports[-1].codec_reason
        wanted = self._tokens()
        for worker in self.workers:
            completion = await worker.generate("fresh", PROMPT, 12, greedy=True)
            assert completion.token_ids == wanted, f"{worker.name} decodes something else"
        return Row(
            case,
            tuple(report.codec for report in reports),
            tuple(report.sent_bytes for report in reports),
            tuple(report.latency_s for report in reports),
        )

    async def _check_parameters(self, worker: RolloutWorker) -> None:
        world, experts = worker.config.tensor_parallel, worker.config.expert_parallel
        for rank, live in enumerate(await worker._engine.collective_rpc("probe_parameters")):
            wanted = vllm_parameters(self._weights, rank=rank, world=world, expert_parallel=experts)
            assert live.keys() == wanted.keys()
            for name, tensor in wanted.items():
                raw = tensor.contiguous().view(torch.uint8).numpy().tobytes()
                assert live[name] == [str(tensor.dtype), list(tensor.shape), raw], (
                    f"{worker.name}: {name} on rank {rank}"
                )

    def _tokens(self) -> list[int]:
        """What transformers decodes greedily with the weights of now."""
        exported = self._directory / f"export-{self._version}"
        exported.mkdir()
        for file in self.path.iterdir():
            if file.suffix == ".json":
                (exported / file.name).write_bytes(file.read_bytes())
        save_file(
            {name: tensor.contiguous() for name, tensor in self._weights.items()},
            exported / "model.safetensors",
            metadata={"format": "pt"},
        )
        return greedy_tokens(exported, PROMPT, 12)


@contextmanager
def model_run(model: str, directory: Path) -> Iterator[ModelRun]:
    """Replicas of `model`; everything has ended afterwards."""
    with ExitStack() as stack:
        yield ModelRun(stack, model, directory)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--trainers", nargs="+", choices=TRAINERS, default=list(TRAINERS))
    arguments = parser.parse_args()
    install()
    began, count = time.monotonic(), 0
    print(f"{'model':<12}{'trainer':<18}{'engine':<12}{'codec':<8}{'sent bytes':<22}{'seconds':<14}", flush=True)
    for model in arguments.models:
        with tempfile.TemporaryDirectory() as directory, model_run(model, Path(directory)) as run:
            for case in cases(model, arguments.trainers):
                row = run.run(case)
                sent, took = "+".join(map(str, row.sent_bytes)), "+".join(f"{each:.2f}" for each in row.latency_s)
                line = f"{model:<12}{case.trainer:<18}{case.engine:<12}{case.codec:<8}{sent:<22}{took:<14}"
                print(line, flush=True)
                count += 1
    print(f"{count} cases, every parameter bit for bit and every token equal, in {time.monotonic() - began:.0f} s")


if __name__ == "__main__":
    main()
