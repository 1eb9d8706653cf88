"""A taskset in verifiers' own form, whose tasks share a server of tools."""

from __future__ import annotations

import os
from collections.abc import Iterable

import verifiers.v1 as vf


class Adder(vf.Toolset[vf.SharedToolsetConfig]):
    @vf.tool
    async def add(self, x: int, y: int) -> str:
        """Adds."""
        if x < 0:
            os._exit(1)
        return str(x + y)


class AddingTask(vf.Task[vf.TaskData, vf.State, vf.TaskConfig]):
    @vf.reward(weight=0.5)
    async def right(self, trace: vf.Trace) -> float:
        if trace.last_message.content == "crash":
            raise RuntimeError("the judge is out")
        return float(trace.last_message.content == "five")


class Adding(vf.Taskset[AddingTask, vf.TasksetConfig]):
    def load(self) -> Iterable[AddingTask]:
        return [AddingTask(vf.TaskData(prompt=prompt), self.config.task) for prompt in ("2+3?", "1+4?", "2+3?")]

    @classmethod
    def toolsets(cls, config: vf.TasksetConfig) -> list[vf.Toolset]:
        return [Adder(vf.SharedToolsetConfig())]


__all__ = ["Adding"]


if __name__ == "__main__":
    Adder.run()
