"""A trainer of one rank as a `json_program`: vLLM's factory and its HTTP clients, one for each server."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from json_program import serve
from sync_clients import DictSource
from tiny_models import load_tensors
from vllm.distributed.weight_transfer import HTTPVLLMWeightSyncClient, WeightTransferTrainerFactory

from weightlane.ckpt_engines import WeightlaneError
from weightlane.rollout.vllm_trainer import WeightlaneTrainerInitInfo


class Trainer:
    """Publishes checkpoints."""

    def connect(self, model: str, urls: list[str], settings: dict[str, Any]) -> None:
        """Make the engine; `settings` are fields of its init info."""
        self._source = DictSource(load_tensors(Path(model)))
        self._engine = WeightTransferTrainerFactory.trainer_init(
            WeightlaneTrainerInitInfo(rank=0, **settings),
            client=[HTTPVLLMWeightSyncClient(url) for url in urls],
            source=self._source,
        )

    def send(self, model: str) -> str:
        """Publish a checkpoint. Returns the error, or nothing."""
        self._source.tensors = load_tensors(Path(model))
        try:
            self._engine.send_weights()
        except WeightlaneError as error:
            return f"{type(error).__name__}: {error}"
        return ""

    def close(self) -> None:
        self._engine.shutdown()


if __name__ == "__main__":
    serve(Trainer())
