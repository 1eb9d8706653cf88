"""`AdapterEngine`: the part of the training engine contract that is about low-rank adapters beside the model."""

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

    Every call of the contract that takes the name of an adapter computes with, or steps, that one. Adapters are added and removed
    between these calls; the one of ``trainer.lora`` is there from `setup` on.
    """

    has_adapters = True

    @property
    @abstractmethod
    def adapters(self) -> tuple[str, ...]:
        """Names of the adapters beside the model, in the order in which they were added."""

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
        """Put a low-rank adapter beside the model, with an optimizer of its own. Collective.

        Args:
            name: Letters, digits, dots, dashes and underscores.
            config: Its rank, scale, layers and learning rate.
            source: A directory as PEFT saves adapters, readable on every rank, whose values it begins with. Without, A is
                Kaiming-uniform as in PEFT, by a generator that only ``config.seed`` seeds, and B is 0.
            replace: Whether it takes the place of an adapter of that name, if there is one, which stays where this fails.
            resume: Whether it also takes the moments and steps that `export_adapter` wrote into `source`, if there are any.
            trained: Whether it has an optimizer. One that has none only computes, and is no part of a saved state.

        Raises:
            ConfigError: The name is taken or is none; the model has no such layers; `source` holds something else than an adapter
                of this configuration for this model, in which case the error names the key or tensor.
            StorageError: A file in `source` cannot be read.
        """

    @abstractmethod
    def remove_adapter(self, name: str) -> None:
        """Drop an adapter that `add_adapter` made, with its gradients and its optimizer. Not collective.

        Raises `ConfigError` for an unknown name, and for the adapter of ``trainer.lora``.
        """

    @abstractmethod
    def export_adapter(self, directory: Path, name: str = "default", *, with_optimizer: bool = False) -> None:
        """Write an adapter as PEFT does: ``adapter_config.json`` and ``adapter_model.safetensors``, in float32. Collective.

        `with_optimizer`, moments and steps are in a file beside them. `directory` must not exist. It appears complete or, after
        any failure, not at all.

        Raises `ConfigError` for an unknown name.
        """

    @abstractmethod
    def load_published(self, before_change: Fence, adapter: str) -> None:
        """Copy an adapter into that of ``trainer.lora``, which is what is published (``publish = "adapter"``). Not collective.

        A gets rows of zeros and B columns of zeros up to the published rank; layers that `adapter` is not beside get zeros.
        `before_change` is called once with all published tensors, as in `optim_step`.

        Raises `ConfigError` where versions are no adapters, or that of ``trainer.lora`` has been trained itself, has a lower
        rank, or is not beside all layers of `adapter`.
        """

    def forward_backward_together(self, calls: Sequence[ForwardBackward]) -> list[BackwardResult | WeightlaneError]:
        """Do what `forward_backward` of each call does, each of another adapter, in as few passes as shapes allow. Collective.

        Sums are rounded in another order than by separate calls; nothing else differs. A call that is refused is answered by its
        error, and the others are computed. Where a pass itself fails, the mini-batches of all its calls do. An engine that
        cannot join passes makes one for each call, as here.
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
    """`engine`, which has adapters. Raises `ConfigError` for one that has none, for which `asked` asks."""
    if not engine.has_adapters:
        raise engine.without_adapters(asked)
    return cast("AdapterEngine", engine)
