"""`Team`: the ranks of one layout, each in a process of its own, and their results combined."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from weightlane.ckpt_engines import WeightlaneError
from weightlane.ckpt_engines.conformance.processes.pool import Pool, RemoteHalf

from ..batches import BatchSpec

MODULE = f"{__package__}.rank_process"
"""The module that a rank's process runs."""


class Team:
    """The ranks of one layout, or only the first `ranks` of them.

    `trainer` has the settings of `TrainerConfig` for this layout, including ``ranks``. Tensors are exchanged through files in the
    directory `files`. An operation has `deadline_s` seconds, and counts as hanging `grace_s` seconds later.
    """

    def __init__(
        self,
        pool: Pool,
        engine: str,
        trainer: Mapping[str, Any],
        files: Path,
        *,
        deadline_s: float,
        grace_s: float,
        ranks: int = 0,
    ) -> None:
        self.engine = engine
        self.trainer = dict(trainer)
        self.world = int(trainer.get("ranks", 1))
        self._files = files
        self._deadline_s = deadline_s
        self.ranks = pool.lend(ranks or self.world, engine, grace_s, team=f"{self.world} ranks")
        for number, rank in enumerate(self.ranks):
            rank.name = f"rank {number}"

    def start(self, rank: RemoteHalf, op: str, /, **arguments: Any) -> None:
        """Request an operation of `RankProcess` from one rank. Batches and paths are sent as JSON."""
        rank.start(op, **{"deadline_s": self._deadline_s, **{name: _plain(each) for name, each in arguments.items()}})

    def all(self, op: str, **arguments: Any) -> list[Any]:
        """Run an operation on every rank and return the results. Raises the first error, after all ranks have answered."""
        return self._all(op, [arguments for _ in self.ranks])

    def _all(self, op: str, arguments: Sequence[Mapping[str, Any]]) -> list[Any]:
        for rank, mine in zip(self.ranks, arguments, strict=True):
            self.start(rank, op, **mine)
        return self._results()

    def _results(self) -> list[Any]:
        answers: list[Any] = []
        failures: list[BaseException] = []
        for rank in self.ranks:
            try:
                answers.append(rank.result())
            except Exception as error:  # noqa: BLE001 - raised below
                failures.append(error)
        if failures:
            raise failures[0]
        return answers

    def all_fail(
        self, types: type[WeightlaneError] | tuple[type[WeightlaneError], ...], op: str, **arguments: Any
    ) -> None:
        """Check that an operation raises one of `types` on every rank."""
        for rank in self.ranks:
            self.start(rank, op, **arguments)
        for rank in self.ranks:
            self.failure(rank, op, types)

    def failure(
        self, rank: RemoteHalf, op: str, types: type[WeightlaneError] | tuple[type[WeightlaneError], ...]
    ) -> WeightlaneError:
        """Return the error of the rank's oldest operation, `op`, which must be one of `types`."""
        wanted = types if isinstance(types, tuple) else (types,)
        expected = f"expected {' or '.join(cls.__name__ for cls in wanted)} from {op} of {rank.name}"
        return rank.failure(wanted, expected)

    def setup(self, model: Path, **trainer: Any) -> None:
        """Close the current engines, and set up new ones with further settings."""
        self.start_setup(model, **trainer)
        self._results()

    def refusal(self, model: Path) -> str:
        """Return the reason why the engine cannot train the model in this layout; empty if it can."""
        self.start(self.ranks[0], "refusal", engine=self.engine, trainer=self.trainer, model=model)
        return str(self.ranks[0].result())

    def start_setup(self, model: Path, **trainer: Any) -> None:
        """Start to set up new engines."""
        for rank in self.ranks:
            self.start(rank, "close")
        for rank in self.ranks:
            rank.result()
        self.start(self.ranks[0], "reserve")
        port = self.ranks[0].result()
        for number, rank in enumerate(self.ranks):
            self.start(
                rank,
                "setup",
                engine=self.engine,
                trainer={**self.trainer, **trainer},
                rank=number,
                port=port,
                model=model,
            )

    def forward(
        self, batch: BatchSpec, outputs: Collection[str] = ("logprobs", "entropy"), top_k: int = 0
    ) -> list[dict[str, torch.Tensor]]:
        """Compute the outputs of every call of `batch`, by ``index/name``; exactly one rank must return each sequence."""
        answers = self._all(
            "forward",
            [{"batch": batch, "outputs": list(outputs), "top_k": top_k, "file": file} for file in self._rank_files()],
        )
        return self._gathered(batch, answers)

    def forward_backward(self, batch: BatchSpec, *, scale: float = 1.0) -> list[dict[str, float]]:
        """Add the gradient of all calls of `batch`; returns the metrics of each, which must be the same on every rank."""
        answers = self.all("forward_backward", batch=batch, scale=scale)
        for rank, answer in zip(self.ranks, answers, strict=True):
            assert answer["metrics"] == answers[0]["metrics"], (
                f"expected the same metrics on every rank, {rank.name} returned {answer['metrics']}, and rank 0"
                f" {answers[0]['metrics']}"
            )
        metrics: list[dict[str, float]] = answers[0]["metrics"]
        return metrics

    def outputs_beside_gradient(self, batch: BatchSpec) -> list[dict[str, torch.Tensor]]:
        """Return outputs like `forward`, but from ``forward_backward``."""
        arguments = {"batch": batch, "outputs": ["logprobs", "entropy"]}
        answers = self._all("forward_backward", [{**arguments, "file": file} for file in self._rank_files()])
        return self._gathered(batch, [answer["rows"] for answer in answers])

    def step(self, batch: BatchSpec, params: Mapping[str, Any] | None = None) -> float:
        """Take one training step, with settings of `AdamParams` if given; returns the gradient norm, equal on every rank."""
        self.forward_backward(batch)
        reports = self.all("optim_step", params=params)
        for report in reports:
            assert not report["error"], f"expected a step, it raised {report['error']}"
        norms = [float(report["norm"]) for report in reports]
        assert norms == norms[:1] * len(norms), f"expected the same gradient norm on every rank, they are {norms}"
        return norms[0]

    def shards(self, wire_dtype: str = "float32") -> list[list[tuple[dict[str, Any], torch.Tensor]]]:
        """Return every rank's shards: their fields and their data."""
        from safetensors.torch import load_file  # noqa: PLC0415 - an extra

        answers = self._all("shards", [{"wire_dtype": wire_dtype, "file": file} for file in self._rank_files()])
        found = []
        for shards, file in zip(answers, self._rank_files(), strict=True):
            data = load_file(file)
            found.append([(shard, data[str(number)]) for number, shard in enumerate(shards)])
        return found

    def tensors(self) -> dict[str, torch.Tensor]:
        """Assemble the full tensors from all ranks' shards; where ranks differ, the last one's elements count."""
        full: dict[str, torch.Tensor] = {}
        for shards in self.shards():
            for shard, data in shards:
                whole = full.setdefault(shard["name"], torch.full(shard["shape"], torch.nan))
                whole[slices(shard, data)] = data.to(whole.dtype)
        return full

    def close(self) -> None:
        """Close every engine."""
        self.all("close")

    def _rank_files(self) -> list[str]:
        return [str(self._files / f"rank-{number}.safetensors") for number in range(len(self.ranks))]

    def _gathered(self, batch: BatchSpec, answers: list[list[list[int]]]) -> list[dict[str, torch.Tensor]]:
        from safetensors.torch import load_file  # noqa: PLC0415 - an extra

        found: list[dict[str, torch.Tensor]] = []
        for call, each in enumerate(batch.batches()):
            rows = sorted(index for answer in answers for index in answer[call])
            assert rows == list(range(len(each))), (
                f"expected every one of {len(each)} sequences once over all ranks, they are {rows}"
            )
            found.append({})
        for file in self._rank_files():
            for key, tensor in load_file(file).items():
                call_number, _, rest = key.partition("/")
                found[int(call_number)][rest] = tensor
        return found


def slices(shard: Mapping[str, Any], data: torch.Tensor) -> tuple[slice, ...]:
    """Return the index of `data`, the data of `shard`, in its full tensor."""
    return tuple(slice(start, start + size) for start, size in zip(shard["starts"], data.shape, strict=True))


def _plain(argument: Any) -> Any:
    if isinstance(argument, BatchSpec):
        return argument.to_plain()
    return str(argument) if isinstance(argument, Path) else argument
