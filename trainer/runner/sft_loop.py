"""`SftLoop`: supervised fine-tuning by jobs of a runner, with evaluations, saved states and exports during training."""

from __future__ import annotations

import time
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Protocol

from weightlane.ckpt_engines import GradientError
from weightlane.plugins import RunHooks

from ..data.batch import TokenBatch
from ..data.sequences import IGNORED
from ..data.sft_examples import Example
from ..data.tasks import TaskStream
from ..loop.failures import STEP, Failures
from ..loop.protocols import LoopState
from .jobs import Forward, SftStep
from .runner import Runner
from .sft_config import SftConfig


class ExportModel(Protocol):
    """Writes the current parameters, which are those of the given step, as a model."""

    def __call__(self, step: int, *, last: bool) -> Coroutine[Any, Any, None]:
        """Write the model of `step`. `last` is true at the end of the run."""


@dataclass(slots=True)
class SftSummary:
    """The closing figures of a run."""

    steps: int = 0
    """Optimizer steps taken, those before a resume included."""
    epochs: float = 0.0
    """How often all examples were trained on."""
    trained_tokens: int = 0
    """Targets, since the start or the resume."""
    heldout_logprob_before: float | None = None
    """Mean log-probability of a held-out target, in nats; None without held-out examples."""
    heldout_logprob_after: float | None = None
    skipped_examples: int = 0
    """Examples that were left out as too long."""
    failures: dict[str, int] = field(default_factory=dict)
    wall_s: float = 0.0

    def to_plain(self) -> dict[str, Any]:
        """These figures as JSON-representable data."""
        return asdict(self)


class SftLoop:
    """One run of supervised fine-tuning, from its first evaluation to its last.

    `seed` determines the order of the examples, which differs in every epoch. A batch may end one epoch and begin the next.

    `save` makes the run resumable from the given state. With `resume`, the model of the runner must be that of this state.
    """

    def __init__(
        self,
        runner: Runner,
        config: SftConfig,
        train: Sequence[Example],
        heldout: Sequence[Example],
        *,
        seed: int,
        hooks: RunHooks,
        save: Callable[[LoopState], Coroutine[Any, Any, None]],
        export: ExportModel,
        resume: LoopState | None = None,
    ) -> None:
        self._runner, self._config, self._hooks = runner, config, hooks
        self._train, self._heldout = train, heldout
        self._save_state, self._export = save, export
        self._step = self._first = self._saved = resume.step if resume else 0
        self._steps = config.all_steps(len(train))
        self._stream = TaskStream(train, seed)
        if resume:
            self._stream.restore(resume.stream, may_change=True)  # the caller has checked the data
        self._failures = Failures(config.max_failed_share, hooks, setting="sft.max_failed_share")
        self._read_tokens, self._stepped_s = 0, 0.0
        self._figures = SftSummary()

    async def run(self) -> SftSummary:
        """Train to the last step, save and export. Raises the error that ended the run."""
        began = time.perf_counter()
        try:
            await self._main()
        except BaseException as error:
            self._hooks.run_ended(facts={"error": str(error)})
            raise
        figures = self._figures
        figures.steps, figures.epochs, figures.failures = self._step, self._epochs(), dict(self._failures.counts)
        figures.wall_s = time.perf_counter() - began
        self._hooks.run_ended(facts=figures.to_plain())
        return figures

    async def _main(self) -> None:
        self._figures.heldout_logprob_before = await self._evaluate()
        self._hooks.run_started(facts={"step": self._step, "steps": self._steps})
        while self._step < self._steps and (batch := self._next_batch()):
            await self._train_on(batch)
        self._figures.heldout_logprob_after = await self._evaluate()
        if self._saved != self._step:  # the resumed state is the newest one, until another one is complete
            await self._save()
        await self._export(self._step, last=True)

    def _next_batch(self) -> list[Example]:
        """The next examples; none when the last epoch is over."""
        count = self._config.batch_size
        if self._config.steps is None:
            count = min(count, self._config.epochs * len(self._train) - self._taken())
        return self._stream.take(count)

    async def _train_on(self, examples: Sequence[Example]) -> None:
        began = time.perf_counter()
        report = await self._runner.run(SftStep(TokenBatch(tuple(example.sequence for example in examples))))
        if report.skipped:
            error = GradientError(report.skipped, part="trainer")
            places = [example.place for example in examples]
            self._failures.failed(STEP, error, step=self._step + 1, tasks=places)
            return
        self._failures.well(STEP)
        self._step = report.step
        self._figures.trained_tokens += int(report.metrics["tokens"])
        self._read_tokens += sum(example.sequence.length for example in examples)
        self._stepped_s += time.perf_counter() - began
        facts = {
            "seconds": report.seconds,
            "grad_norm": report.grad_norm,
            "tokens_per_s": self._read_tokens / self._stepped_s,
            "failed_items": self._failures.counts.total(),
            "epoch": self._epochs(),
            **report.metrics,
        }
        self._hooks.training_step(step=report.step, facts=facts)
        if self._is_due(self._config.evaluate_every):
            await self._evaluate()
        if self._is_due(self._config.save_every):
            await self._save()
        if self._is_due(self._config.export_every):
            await self._export(self._step, last=False)

    async def _evaluate(self) -> float | None:
        """The mean log-probability of the held-out targets; None if there are none."""
        if not self._heldout:
            return None
        started, size, total, count = time.perf_counter(), self._config.batch_size, 0.0, 0
        batches = [self._heldout[first : first + size] for first in range(0, len(self._heldout), size)]
        for batch in batches:
            sequences = tuple(example.sequence for example in batch)
            outputs = await self._runner.run(Forward(TokenBatch(sequences)))
            for sequence, found in zip(sequences, outputs, strict=True):
                counted = sequence.targets != IGNORED
                total += float(found["logprobs"][counted].double().sum())
                count += int(counted.sum())
        facts = {
            "mean_logprob": total / count,
            "tasks": len(self._heldout),
            "failed": 0,
            "seconds": time.perf_counter() - started,
        }
        self._hooks.evaluated(step=self._step, facts=facts)
        return total / count

    async def _save(self) -> None:
        self._saved = self._step
        await self._save_state(LoopState(self._step, self._stream.state(), []))

    def _taken(self) -> int:
        """Examples that were taken from the stream."""
        state: dict[str, int] = self._stream.state()
        return state["epoch"] * len(self._train) + state["position"]

    def _epochs(self) -> float:
        return self._taken() / len(self._train)

    def _is_due(self, every: int) -> bool:
        """Whether an action that happens every `every` steps is due. At the end of a run, all of them happen anyway."""
        return every > 0 and self._first < self._step < self._steps and self._step % every == 0
