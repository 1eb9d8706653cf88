"""One of two trainer ranks, as a `json_program`: publishes sources of every kind to a `FakeVLLM` of rank 0."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from json_program import serve
from patience import PATIENT
from sync_clients import FULL_PASS, WEIGHTS, DictSource, FakeVLLM, OwnedTensors, Slices, module_of
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from vllm.distributed.weight_transfer import ModuleSource, WeightTransferTrainerFactory

from weightlane.ckpt_engines import WeightlaneError
from weightlane.rollout.vllm_trainer import WeightlaneTrainerInitInfo

HELD = [{"layers.0.w", "layers.1.w"}, {"embed.weight", "layers.1.w"}]
"""Names of what each rank holds."""


def sharded() -> torch.nn.Module:
    module = module_of(WEIGHTS)
    fully_shard(module)
    return module


class Gathered(DictSource):
    """Yields sharded tensors, of which nothing was declared before."""


setattr(Gathered, FULL_PASS, lambda _: iter(sharded().named_parameters()))


class Broken(DictSource):
    """Raises in the middle of a pass."""


def _broken(_: object) -> Iterator[tuple[str, Any]]:
    yield "embed.weight", WEIGHTS["embed.weight"]
    raise ValueError("rank 1 has no such expert")


setattr(Broken, FULL_PASS, _broken)


class Rank:
    """One of two ranks."""

    def __init__(self, rank: int, port: int) -> None:
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
        self._rank = rank

    def publish(self, kind: str) -> bool:
        """Whether the version of a source is served, and nothing was gathered for it unless the source does."""
        make: dict[str, Callable[[], Any]] = {
            "sharded module": lambda: ModuleSource(sharded()),
            "held names": lambda: DictSource(WEIGHTS, HELD, self._rank),
            "owned tensors": lambda: OwnedTensors(WEIGHTS, HELD, self._rank),
            "slices": lambda: Slices(WEIGHTS, rank=self._rank),
            "gathered": lambda: Gathered(WEIGHTS),
        }
        source = make[kind]()
        full_tensor, gathered = DTensor.full_tensor, []
        DTensor.full_tensor = lambda tensor, **more: gathered.append(tensor) or full_tensor(tensor, **more)
        try:
            return self._served(source) and bool(gathered) == (kind == "gathered")
        finally:
            DTensor.full_tensor = full_tensor

    def failing(self) -> str:
        """The error of a source that raises on rank 1 only."""
        source = (Broken if self._rank else DictSource)(WEIGHTS, HELD, self._rank)
        try:
            self._served(source)
        except WeightlaneError as error:
            return error.message
        return "nothing"

    def _served(self, source: Any) -> bool:
        fake = FakeVLLM(WEIGHTS)
        info = WeightlaneTrainerInitInfo(rank=self._rank, sync=PATIENT)
        engine = WeightTransferTrainerFactory.trainer_init(info, client=fake, source=source)
        try:
            engine.send_weights()
            return self._rank > 0 or fake.serves(WEIGHTS)
        finally:
            engine.shutdown()
            fake.close()

    def close(self) -> None:
        dist.destroy_process_group()


if __name__ == "__main__":
    serve(Rank(*map(int, sys.argv[1:])))
