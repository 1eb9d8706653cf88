"""Trainer ranks in processes of their own, called at the same time: most of their calls are collective."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, closing
from pathlib import Path
from typing import Any

from json_program import Program, call_all
from ports import free_port
from waiting import HANG_S

from weightlane.sync import Coordinator, Rendezvous, SyncConfig
from weightlane.sync.config import CodecPolicy, Quantise

_PROGRAM = Path(__file__).with_name("trainer_process.py")


class Trainers:
    """`trainer_process.py`, once for each rank."""

    def __init__(self, world: int) -> None:
        port = free_port()
        ranks = [json.dumps({"rank": rank, "world": world, "port": port}) for rank in range(world)]
        self._programs = [Program(_PROGRAM, rank) for rank in ranks]
        self.names = [f"trainer-{rank}" for rank in range(world)]

    def call(self, method: str, *arguments: Any) -> list[Any]:
        """Call `method` on every rank and return the answers in rank order."""
        return call_all(self._programs, method, *arguments)

    @asynccontextmanager
    async def publishing(
        self,
        replicas: Sequence[Any],
        engine: str,
        store: Path = Path(),
        dtype: str = "float32",
        quantise: Quantise = "none",
        codec: CodecPolicy = "dense",
    ) -> AsyncIterator[Coordinator]:
        """Connected to `replicas`, all of which have to take every version; `store` is for the engine that needs one."""
        options = {"path": str(store)} if engine == "filesystem" else {}
        rendezvous = Rendezvous.host()
        address = rendezvous.address.to_plain()
        self.call("connect", address, engine, options, dtype, self.call("placement", dtype), quantise, codec)
        await asyncio.gather(*(replica.connect(address, engine, options) for replica in replicas))
        config = SyncConfig(deadline_s=HANG_S, quorum=1.0)
        with closing(Coordinator(rendezvous, self.names, replicas, config)) as coordinator:
            await coordinator.connect()
            yield coordinator

    def close(self) -> None:
        """End them."""
        for program in self._programs:
            program.kill()
