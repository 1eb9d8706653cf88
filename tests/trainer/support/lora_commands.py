"""Commands of `engine_worker` that are about adapters."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from engine_batches import LOSSES, Sample, batch_of, make_batch, make_samples, mixed
from torch.distributed.tensor import DTensor

from weightlane.trainer.config import LoraConfig
from weightlane.trainer.data.batch import LossDenominators
from weightlane.trainer.engines.contract import ForwardBackward


class LoraCommands:
    """A part of the worker."""

    _engine: Any
    _api: Any

    def adapter(self, name: str, source: str | None = None, **config: Any) -> tuple[str, ...]:
        """Add an adapter; returns the names of all."""
        self._engine.add_adapter(name, LoraConfig(**config), None if source is None else Path(source))
        return tuple(self._engine.adapters)

    def remove(self, name: str) -> tuple[str, ...]:
        self._engine.remove_adapter(name)
        return tuple(self._engine.adapters)

    def export_adapter(self, directory: str, name: str) -> None:
        self._engine.export_adapter(Path(directory), name)

    def adapter_gradient(self, name: str, rows: int, calls: list[list[int]]) -> tuple[Any, ...]:
        """The loss of `rows` samples that are split into `calls`, the gradient's norm, and this rank's slices of it.

        AdamW's first moment is the gradient itself where its decay rate is 0.
        """
        samples = make_samples(0, rows)
        denominators = LossDenominators.of(batch_of(samples))
        results = [
            self._engine.forward_backward(batch_of(samples[row] for row in call), mixed, denominators, adapter=name)
            for call in calls
        ]
        norm = self._engine.optim_step(_nothing_is_published, name)
        slices = [
            (piece.key.removesuffix("|exp_avg"), piece.shape, piece.box.starts, piece.data.numpy())
            for piece in self._engine._lora.chosen(name).slices()
            if piece.key.endswith("|exp_avg")
        ]
        return sum(result.metrics["loss"] for result in results), norm, slices

    def adapter_steps(self, order: list[tuple[str, str, int]]) -> list[float]:
        """Do ``("forward_backward", adapter, batch)`` and ``("optim_step", adapter, 0)`` in order; norms of the steps.

        A mini-batch has two batches: that of a number, and the next one.
        """
        norms = []
        for do, name, number in order:
            if do == "forward_backward":
                both = LossDenominators.of(
                    *(make_batch(each) for each in (number - number % 2, number - number % 2 + 1))
                )
                self._engine.forward_backward(make_batch(number), LOSSES["policy"], both, adapter=name)
            else:
                norms.append(self._engine.optim_step(lambda names: None, name))
        return norms

    def adapter_fails_together(self, name: str) -> tuple[list[str], int]:
        """What two calls of a mini-batch, made together, end with if the second has an unknown token; gradients that are left."""
        batches = make_batch(0), batch_of([Sample((1,), (9999, 3), (-4.0, -4.0), 1.0)] * 4)
        both = LossDenominators.of(*batches)
        calls = [ForwardBackward(batch, mixed, both, adapter=name) for batch in batches]
        answers = self._engine.forward_backward_together(calls)
        return [type(each).__name__ for each in answers], len(self._engine._lora.chosen(name).memory_of("gradients"))

    def adapter_offload(self, state: str) -> None:
        """Move everything to the host, where no tensor of an adapter has memory, and back; then load the model's from `state`."""
        engine = self._engine
        adapter = engine._lora.chosen("default")
        gradients = [parameter.grad for parameter in adapter.parameters if parameter.grad is not None]
        shards = [shard.data for shard in engine.local_shards(torch.float32)]
        moved = [*(piece.data for piece in adapter.slices()), *gradients, *shards]
        engine.offload()
        assert not any(tensor.untyped_storage().nbytes() for tensor in moved)
        engine.zero_grad("")  # the model's, and not the adapter's
        engine.onload()
        engine.offload(["gradients"])
        engine.load(Path(state), adapters=False)

    def adapter_state(self, name: str) -> list[tuple[Any, ...]]:
        """Every tensor on this rank of an adapter, or of the slot of this name, moments included."""
        engine = self._engine if self._api is None else self._api.engine
        pieces = engine._lora.chosen(name).slices()
        return [(piece.key, piece.shape, piece.box.starts, piece.data.clone().numpy()) for piece in pieces]

    def parameter_bytes(self) -> int:
        """Bytes of this rank's parameters, those of adapters and merged weights included."""
        held = (
            each.to_local() if isinstance(each, DTensor) else each for each in self._engine._memory_of("parameters")
        )
        storages = {each.untyped_storage()._cdata: each.untyped_storage().nbytes() for each in held}
        return sum(storages.values())

    def moment_bytes(self) -> int:
        """Bytes of the moments on this rank."""
        return sum(each.untyped_storage().nbytes() for each in self._engine._memory_of("optimizer") if each.ndim)

    def base_has_state(self) -> tuple[bool, int]:
        """Whether any of the model's own weights asks for gradients, and how many moments of theirs there are."""
        engine = self._engine
        if engine.config.engine == "megatron":
            from weightlane.trainer.engines.megatron.weights import moments_of

            asks = any(parameter.requires_grad for chunk in engine._chunks for parameter in chunk.parameters())
            return asks, len(moments_of(engine._optimizer))
        asks = any(parameter.requires_grad for parameter in engine._model.parameters())
        return asks, len(engine._optimizer.state)


def _nothing_is_published(names: Any) -> None:
    raise AssertionError(
        f"a step of this adapter changes no checkpoint tensor, but the fence was told of {list(names)}"
    )
