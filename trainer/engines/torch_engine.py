"""`TorchEngine`, the base of training engines on torch.distributed: joins the ranks, counts steps, refuses what cannot work."""

from __future__ import annotations

import gc
import math
import random
from abc import abstractmethod
from collections.abc import Collection
from contextlib import AbstractContextManager
from pathlib import Path

import torch

from weightlane.ckpt_engines import ConfigError, GradientError, WeightlaneError
from weightlane.sync.version.tensor_spec import dtype_of

from ..config import TrainerConfig
from ..data.batch import TrainBatch
from ..objectives.losses import LossOutput
from .contract import TrainingEngine
from .rank_collectives import join_ranks, leave_ranks, typed_collective_errors


class TorchEngine(TrainingEngine):
    """A training engine whose ranks meet in torch.distributed's default group and step by AdamW.

    Subclasses set `_torn` while some parameters of a step have changed and others have not, and count `_step`.
    """

    def __init__(self, config: TrainerConfig, rank: int, world: int, rendezvous: tuple[str, int]) -> None:
        super().__init__(config, rank, world, rendezvous)
        self._part = f"trainer rank {rank}"
        self._device = self._choose_device()
        self._owns_group = False
        self._torn = False
        self._step = 0
        self._kept: Collection[str] = ()
        """Checkpoint tensors that are float32 whatever type the others travel or are exported in."""

    @property
    def step(self) -> int:
        """See `TrainingEngine.step`."""
        return self._step

    @property
    def _compute_dtype(self) -> torch.dtype:
        """Dtype of forward and backward."""
        asked = self.config.compute_dtype
        if asked != "auto":
            return dtype_of(asked)
        return torch.bfloat16 if self._device.type == "cuda" else torch.float32

    @abstractmethod
    def _clear_gradients(self) -> None:
        """Make them zero on this rank."""

    def _choose_device(self) -> torch.device:
        available = torch.cuda.is_available()
        if self.config.device == "cuda" and not available:
            raise ConfigError("trainer.device is cuda, but torch sees no CUDA device.", part="trainer")
        if self.config.device == "cpu" or not available:
            return torch.device("cpu")
        return torch.device("cuda", self.rank % torch.cuda.device_count())

    def _join(self, model_dir: Path, seed: int) -> None:
        """Get this process ready to train the model in `model_dir`, and meet the other ranks. Collective."""
        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)
        else:
            torch.set_num_threads(self.config.threads_per_rank)
        random.seed(seed)
        torch.manual_seed(seed)
        self._model_dir = model_dir
        self._owns_group = join_ranks(
            self.rank, self.world, self.rendezvous, self._device, self.config.collective_timeout_s
        )

    def _leave(self) -> None:
        """Leave the ranks that `_join` joined. Idempotent, never raises.

        What had a process group is garbage by now, most of it in cycles. It is collected at once: until then every group of
        gloo keeps three threads, one of which polls a hundred times a second.
        """
        if self._owns_group:
            self._owns_group = False
            leave_ranks()
        gc.collect()

    def _collective(self, waiting_for: str) -> AbstractContextManager[None]:
        return typed_collective_errors(waiting_for, self._part, self.config.collective_timeout_s)

    def _refuse_torn(self) -> None:
        if self._torn:
            raise WeightlaneError(
                f"step {self._step} stopped when some parameters had changed and others had not.",
                part=self._part,
                hint="Load a saved state, or end this run; the error of that step says why it stopped.",
            )

    def _refuse_not_finite(self, norm: float) -> None:
        """Raise, with the gradients cleared, unless the gradient norm is a number."""
        if not math.isfinite(norm):
            self._clear_gradients()
            raise GradientError(
                f"the gradient norm is {norm} at step {self._step}; no parameter was changed.",
                part=self._part,
                hint="Lower trainer.learning_rate, or look for broken log-probabilities or rewards in the batch.",
            )

    def _learning_rate(self) -> float:
        """Learning rate of the next step: it rises linearly over the warm-up."""
        return self.config.learning_rate * min(1.0, (self._step + 1) / max(1, self.config.lr_warmup_steps))


def means(sums: dict[str, torch.Tensor], totals: torch.Tensor, batch: TrainBatch) -> dict[str, float]:
    """The metrics of a batch from its `totals` over all ranks, float64 [len(sums)], in the order of `sums`."""
    of = {name: batch.loss_tokens if name == "loss" else batch.computed_tokens for name in sums}
    found = {name: total / of[name] for name, total in zip(sums, totals.tolist(), strict=True)}
    return {**found, "tokens": float(batch.computed_tokens)}


def add_sums(sums: dict[str, torch.Tensor], output: LossOutput) -> None:
    """Add one micro batch's loss and metrics, each summed over its tokens, to `sums`."""
    for name, value in {"loss": output.loss_sum.detach(), **output.metric_sums}.items():
        sums[name] = sums[name] + value if name in sums else value
