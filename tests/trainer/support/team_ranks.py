"""`TeamRanks`: a team of processes as a group of ranks that hosts roles."""

from __future__ import annotations

import asyncio
import pickle
from collections.abc import Awaitable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NoReturn

import cloudpickle
from engine_ranks import Ranks


class TeamRanks:
    """The ranks of `team`, see `weightlane.trainer.dispatch.ranks.Ranks`."""

    def __init__(self, team: Ranks) -> None:
        self._team, self.world = team, len(team)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="team-ranks")

    async def rendezvous(self) -> tuple[str, int]:
        return "127.0.0.1", 0  # they have met

    def put(self, value: Any) -> Any:
        return value

    def call(self, method: str, *args: Any) -> Awaitable[list[Any]]:
        sent = cloudpickle.dumps(args)  # as Ray does
        return asyncio.wrap_future(self._thread.submit(self._answers, method, sent))

    async def watch(self) -> NoReturn:
        await asyncio.Event().wait()
        raise AssertionError

    async def close(self) -> None:
        await self.call("close")
        self._thread.shutdown()

    def _answers(self, method: str, args: bytes) -> list[Any]:
        answers = [pickle.loads(each) for each in self._team.all("rank_worker", method=method, args=args)]
        for answer in answers:
            if isinstance(answer, Exception):
                raise answer
        return answers
