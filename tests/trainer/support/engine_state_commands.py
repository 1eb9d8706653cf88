"""Commands of `engine_worker` about an engine's head, its mode, and where its state is."""

from __future__ import annotations

from typing import Any

import torch
from engine_batches import LOSSES, make_batch

from weightlane.ckpt_engines import WeightlaneError
from weightlane.trainer.data.batch import MiniBatch


class StateCommands:
    """Commands for the engine `_engine`."""

    _engine: Any

    def values(self, rows: int) -> dict[int, dict[str, Any]]:
        """Values and hidden states of a batch by sequence, without gradient."""
        found = self._engine.forward(make_batch(0, rows), ("values", "hidden"))
        return {index: {name: each.numpy() for name, each in outputs.items()} for index, outputs in found.items()}

    def ask(self, outputs: tuple[Any, ...], top_k: int = 0) -> list[str]:
        """The names of outputs of a forward pass."""
        found = self._engine.forward(make_batch(0), outputs, top_k)
        return sorted({name for each in found.values() for name in each})

    def train_with_dropout(self, mode: bool) -> dict[str, Any]:
        """Two losses of the same batch and parameters, and its log-probabilities."""
        self._engine.train(mode)
        losses = [self._engine.forward_backward(make_batch(0), LOSSES["sft"]).metrics["loss"] for _ in range(2)]
        logprobs = {index: found["logprobs"].numpy() for index, found in self._engine.forward(make_batch(0)).items()}
        self._engine.optim_step(lambda names: None)
        return {"losses": losses, "logprobs": logprobs}

    def offload_and_train(self, parts: tuple[Any, ...] = ()) -> dict[str, Any]:
        """Two steps, before, amid and after which `parts` of the state are away; what is said when they are needed."""
        engine, said = self._engine, []
        shards = engine.local_shards(torch.float32)
        mini_batch = MiniBatch.of(make_batch(0), make_batch(1))

        def away_and_back() -> int:
            engine.offload(parts)
            if parts:
                try:
                    engine.optim_step(lambda names: None)
                except WeightlaneError as error:
                    said.append(str(error))
            left = sum(shard.data.untyped_storage().nbytes() for shard in shards)
            assert engine.offloaded == set(parts)
            engine.onload(parts)
            assert not engine.offloaded
            return left

        left = away_and_back()
        for number in range(2):
            engine.forward_backward(make_batch(number), LOSSES["policy"], mini_batch)
            away_and_back()
        norm = engine.optim_step(lambda names: None)
        away_and_back()
        loss = engine.forward_backward(make_batch(2), LOSSES["policy"]).metrics["loss"]
        norms = [norm, engine.optim_step(lambda names: None)]
        return {"left": left, "norms": norms, "loss": loss, "said": said}
