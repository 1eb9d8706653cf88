"""Every trainer layout into every rollout layout, over every engine and codec: parameters bit for bit, tokens exactly.

    python tests/rollout/trainers/matrix.py [--models qwen3 ...] [--trainers fsdp2 ...]

runs all of it, which takes a while, and prints a table; `test_trainers_to_vllm.py` runs a part with every test run.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "support"))
import helper_paths  # noqa: F401 - it makes the others importable
from fork_server import install
from running_worker import PROMPT, RecordingWorker, probed_worker, started
from tiny_models import (
    add_tokenizer,
    copy_with,
    greedy_tokens,
    load_tensors,
    make_llama,
    make_mla_moe,
    make_qwen3,
    make_qwen3_moe,
)
from trainer_process import nudge
from trainer_ranks import Trainers

from weightlane.sync import SyncReport
from weightlane.sync.config import CodecPolicy

VOCAB = 300
"""Needs padding in vLLM and in megatron-core, and gives two trainer ranks an uneven part of a fused tensor."""
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
    """Engine settings that a mixture of experts needs in addition."""
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
    "mla-moe": lambda path: make_mla_moe(path, seed=3, vocab=VOCAB),
}
ENGINES = ("gloo", "shm", "filesystem")
CODECS: tuple[CodecPolicy, ...] = ("dense", "delta")


@dataclass(frozen=True, slots=True)
class Case:
    """One connection: a trainer, an engine, a codec."""

    trainer: str
    engine: str
    codec: CodecPolicy


def cases(model: str, trainers: Sequence[str] = tuple(TRAINERS)) -> list[Case]:
    """All that make sense for a model."""
    return [
        Case(trainer, engine, codec)
        for trainer in trainers
        if "moe" in model or not TRAINERS[trainer].experts_only
        for engine in ENGINES
        for codec in CODECS
    ]


def splits_of(model: str) -> list[tuple[int, bool]]:
    """Ranks of each replica of a model, and whether its experts are divided between them."""
    return [(1, False), (2, False), *([(2, True)] if "moe" in model else [])]


class ModelRun:
    """One model in a replica for each of `splits`, and trainers on demand."""

    def __init__(self, stack: ExitStack, model: str, directory: Path, splits: Sequence[tuple[int, bool]]) -> None:
        self._stack, self._directory, self._model = stack, directory, model
        self.path = MODELS[model](directory / "model")
        add_tokenizer(self.path, VOCAB)
        self._trainers: dict[int, Trainers] = {}
        self.asked: dict[str, str] = {}
        """Digest of what each rollout rank asked for in the last case; empty where it asked for everything."""
        self._layout: str | None = None
        self._version = 0
        self._weights: dict[str, torch.Tensor] = {}
        self.workers = [self._worker(number, *split) for number, split in enumerate(splits)]
        self.runner = stack.enter_context(started(*self.workers))

    def _worker(self, number: int, ranks: int, experts: bool) -> RecordingWorker:
        split = {"tensor_parallel": ranks, "expert_parallel": experts}
        return probed_worker(f"rollout-{number}", self.path, in_engine=ranks == 1, dtype="float32", **split)

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

    def run(self, case: Case) -> list[SyncReport]:
        """Two versions over a connection of its own; AssertionError where something differs."""
        return self.runner.run(self._versions(case, self._trained_by(case.trainer)))

    async def _versions(self, case: Case, trainers: Trainers) -> list[SyncReport]:
        reports = []
        store = self._directory / f"store-{self._version}"
        async with trainers.publishing(self.workers, case.engine, store, codec=case.codec) as coordinator:
            self.asked = {name: hello.need for name, hello in coordinator._queue.hellos.items()}
            for _ in range(2):
                self._version += 1
                trainers.call("nudge", self._version, EVERY)
                for tensor in self._weights.values():
                    tensor.add_(nudge(torch.arange(tensor.numel()).view(tensor.shape), self._version, EVERY))
                trainers.call("publish", self._version)
                reports.append(await coordinator.sync(self._version))
                for worker in self.workers:
                    await worker.check(self._weights)
            assert reports[-1].codec == case.codec, reports[-1].codec_reason
            await self.check_tokens(copy_with(self._weights, self.path, self._directory / f"export-{self._version}"))
        return reports

    async def check_tokens(self, model: Path) -> None:
        """Every replica decodes what transformers does with the weights of `model`."""
        wanted = greedy_tokens(model, PROMPT, 12)
        for worker in self.workers:
            completion = await worker.generate("fresh", PROMPT, 12, greedy=True)
            assert completion.token_ids == wanted, f"{worker.name} decodes something else"


@contextmanager
def model_run(model: str, directory: Path, splits: Sequence[tuple[int, bool]] | None = None) -> Iterator[ModelRun]:
    """Replicas of `model`; everything has ended afterwards."""
    with ExitStack() as stack:
        yield ModelRun(stack, model, directory, splits or splits_of(model))


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
                reports = run.run(case)
                sent = "+".join(str(report.sent_bytes) for report in reports)
                took = "+".join(f"{report.latency_s:.2f}" for report in reports)
                line = f"{model:<12}{case.trainer:<18}{case.engine:<12}{case.codec:<8}{sent:<22}{took:<14}"
                print(line, flush=True)
                count += 1
    print(f"{count} cases, every parameter bit for bit and every token equal, in {time.monotonic() - began:.0f} s")


if __name__ == "__main__":
    main()
