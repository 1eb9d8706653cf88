"""Trainer ranks in processes of their own, called at the same time: most of their calls are collective."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from json_program import Program, call_all
from ports import free_port

_PROGRAM = Path(__file__).with_name("trainer_process.py")


class Trainers:
    """`trainer_process.py`, once for each rank."""

    def __init__(self, world: int) -> None:
        port = free_port()
        ranks = [json.dumps({"rank": rank, "world": world, "port": port}) for rank in range(world)]
        self._programs = [Program(_PROGRAM, rank) for rank in ranks]
        self.names = [f"trainer-{rank}" for rank in range(world)]

    def call(self, method: str, *arguments: Any) -> list[Any]:
        """What every rank answers, in rank order."""
        return call_all(self._programs, method, *arguments)

    def close(self) -> None:
        """End them."""
        for program in self._programs:
            program.kill()
