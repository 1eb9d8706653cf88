"""Episodes whose model says what it is given, and environments by their entry points, as a run makes them."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from importlib.metadata import entry_points
from typing import Any

from weightlane.trainer.loop.environments import Environment, EnvironmentContext, Message, Reply, Verdict

MOST_S = 300.0
"""A limit that only a hang reaches."""


class Scripted:
    """An episode whose model says `texts`, one after the other, and then has no further turn. Keeps what it read."""

    def __init__(self, *texts: str, before_reply: Callable[[], Awaitable[None]] | None = None) -> None:
        self.texts, self.read, self._before_reply = list(texts), list[Any](), before_reply

    async def reply(self, news: str | Sequence[Message] | None = None, **_: Any) -> Reply:
        self.read.append(news)
        await (self._before_reply() if self._before_reply else asyncio.sleep(0))
        return Reply(self.texts.pop(0), "stop") if self.texts else Reply("", "turns")

    async def judge(self, reply: Reply) -> float:
        raise AssertionError("the environment has a reward of its own")

    @property
    def token_ids(self) -> Sequence[int]:
        return []


def environment(name: str, **options: Any) -> Environment:
    """The environment that is registered as `name`."""
    (point,) = entry_points(group="weightlane.environments", name=name)
    made: type[Environment] = point.load()
    return made(made.options_type.model_validate(options), EnvironmentContext())


def played(made: Environment, *episodes: tuple[Mapping[str, Any], Scripted]) -> list[Verdict | BaseException]:
    """Play all episodes at once, and close the environment. Errors are results."""

    async def play() -> list[Verdict | BaseException]:
        async with asyncio.timeout(MOST_S):
            results = await asyncio.gather(*(made.play(*each) for each in episodes), return_exceptions=True)
            await made.close()
        return results

    return asyncio.run(play())
