"""`AdapterEngine`: the part of the training engine contract for low-rank adapters of the model."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from pathlib import Path
from typing import cast

from weightlane.ckpt_engines import WeightlaneError

from ...config import LoraConfig
from .calls import ForwardBackward
from .engine import BackwardResult, Fence, TrainingEngine


class AdapterEngine(TrainingEngine):
    """A training engine whose model can have any number of adapters, each with gradients and an optimizer of its own.

    Every call of the contract that takes the name of an adapter computes with, or steps, that adapter. Adapters are added and
    removed between these calls; the one of ``trainer.lora`` exists from `setup` on.
    """

    has_adapters = True

    @property
    @abstractmethod
    def adapters(self) -> tuple[str, ...]:
        """Names of the model's adapters, in the order in which they were added."""

    @abstractmethod
    def steps_of(self, adapter: str | None = None) -> int:
        """Optimizer steps that an adapter has taken, or with None `step`. Raises `ConfigError` for an unknown name."""

    @abstractmethod
    def add_adapter(
        self,
        name: str,
        config: LoraConfig,
        source: Path | None = None,
        *,
        replace: bool = False,
        resume: bool = False,
        trained: bool = True,
    ) -> None:
        """Add a low-rank adapter to the model, with an optimizer of its own. Collective.

        Args:
            name: Letters, digits, dots, dashes and underscores.
            config: Its rank, scale, layers and learning rate.
            source: A directory in PEFT's format, readable on every rank, from which the adapter's values are loaded. Without it,
                A is Kaiming-uniform as in PEFT, from a generator that only ``config.seed`` seeds, and B is 0.
            replace: Whether to replace an adapter of that name, if there is one. The old one stays if this fails.
            resume: Whether to load also the moments and steps that `export_adapter` wrote into `source`, if there are any.
            trained: Whether it has an optimizer. An adapter without one is never stepped, and is not part of a saved state.

        Raises:
            ConfigError: The name is taken or not allowed; the model has no such layers; `source` does not hold an adapter
                of this configuration for this model, in which case the error names the key or tensor.
            StorageError: A file in `source` cannot be read.
        """

    @abstractmethod
    def remove_adapter(self, name: str) -> None:
        """Remove an adapter that `add_adapter` added, with its gradients and its optimizer. Not collective.

        Raises `ConfigError` for an unknown name, and for the adapter of ``trainer.lora``.
        """

    @abstractmethod
    def export_adapter(self, directory: Path, name: str = "default", *, with_optimizer: bool = False) -> None:
        """Write an adapter as PEFT does: ``adapter_config.json`` and ``adapter_model.safetensors``, in float32. Collective.

        With `with_optimizer`, a further file has the moments and steps. `directory` must not exist. It appears complete or,
        after any failure, not at all.

        Raises `ConfigError` for an unknown name.
        """

    @abstractmethod
    def load_published(self, before_change: Fence, adapter: str) -> None:
        """Copy `adapter` into the published adapter, the one of ``trainer.lora`` (``publish = "adapter"``). Not collective.

        A is padded with rows of zeros and B with columns of zeros up to the published rank; layers that `adapter` lacks get
        zeros. `before_change` is called once with all published tensors, as in `optim_step`.

        Raises `ConfigError` if adapters are not what is published, or if the adapter of ``trainer.lora`` has been trained
        itself, has a lower rank, or lacks a layer of `adapter`.
        """

    def forward_backward_together(self, calls: Sequence[ForwardBackward]) -> list[BackwardResult | WeightlaneError]:
        """Run several `forward_backward` calls, each for another adapter, in as few passes as shapes allow. Collective.

        The results differ from those of separate calls only in the order in which sums are rounded. The result of a refused call
        is its error, and the others are computed. If a pass itself fails, so do the mini-batches of all its calls. An engine that
        cannot combine calls makes one pass for each, as this default does.
        """
        found: list[BackwardResult | WeightlaneError] = []
        for call in calls:
            try:
                found.append(
                    self.forward_backward(call.batch, call.function, call.denominators, call.outputs, call.adapter)
                )
            except WeightlaneError as error:
                found.append(error)
        return found


def with_adapters(engine: TrainingEngine, asked: str) -> AdapterEngine:
    """Return `engine` as an `AdapterEngine`.

    Raises `ConfigError` if it has no adapters; the error names `asked`, the request that needs them.
    """
    if not engine.has_adapters:
        raise engine.without_adapters(asked)
    return cast("AdapterEngine", engine)
