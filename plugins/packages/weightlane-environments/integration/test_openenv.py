"""The environment ``openenv`` against a server of openenv, beside openenv's own client."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from episodes import Scripted, environment, played
from openenv.core import GenericEnvClient
from openenv_server import PATIENCE_S, PING_S

from weightlane.ckpt_engines import (
    ConfigError,
    DeadlineExceededError,
    EpisodeError,
    PeerLostError,
    ProtocolError,
    TransportError,
)
from weightlane.trainer.loop.environments import Verdict

SESSIONS = 3
Start = Callable[[int], str]


@pytest.fixture(scope="module")
def url(start_server: Start) -> str:
    return start_server(SESSIONS)


def guessing(url: str, **options: Any) -> Any:
    options = {"action_field": "guess", "observation_field": "hint", **options}
    return environment("openenv", url=url, **options)


async def by_the_client(url: str, reset: dict[str, Any], guesses: list[str]) -> tuple[list[str], list[float], bool]:
    """What openenv's own client reads, and its rewards."""
    async with GenericEnvClient(base_url=url) as client:
        result = await client.reset(**reset)
        said, rewards = [result.observation["hint"]], []
        for guess in guesses:
            result = await client.step({"guess": guess})
            rewards.append(result.reward or 0.0)
            if result.done:
                break
            said.append(result.observation["hint"])
        return said, rewards, result.done


def test_more_episodes_than_sessions_are_played_as_by_openenvs_client(url: str) -> None:
    """The server is still starting when the first episodes begin."""
    played_ones = [(seed, [str(guess) for guess in range(first, 10, 2)]) for seed in range(4) for first in (0, 1)]
    tasks = [({"reset": {"seed": seed}, "messages": [], "prompt": ""}, guesses) for seed, guesses in played_ones]
    episodes = [Scripted(*guesses) for _, guesses in tasks]
    made = guessing(url, begin_time_limit_s=120)
    verdicts = played(made, *((task, episode) for (task, _), episode in zip(tasks, episodes, strict=True)))
    ends = set()
    for (task, guesses), episode, verdict in zip(tasks, episodes, verdicts, strict=True):
        said, rewards, done = asyncio.run(by_the_client(url, task["reset"], guesses))
        assert isinstance(verdict, Verdict), verdict
        assert episode.read == [[{"role": "user", "content": text}] for text in said]
        assert verdict.reward == sum(rewards)
        assert verdict.metrics == {"steps": len(rewards), "finished": float(done)}
        ends.add(done)
    assert ends == {True, False}


def test_options_name_the_fields_the_first_prompt_and_the_reward(url: str) -> None:
    task = {"reset": {"seed": 1}, "prompt": "guess!", "answer": ""}
    options = {"first": "task", "reward": "last", "action": {"shout": True}, "reset": {"most": 5, "seed": 9}}
    episode = Scripted("I think: 0", "I think: 1", "I think: 4", "I think: 2")
    (verdict,) = played(guessing(url, after=": ", text="({observation})", **options), (task, episode))
    assert episode.read == [None, "(MORE)", "(MORE)", "(LESS)"]
    assert isinstance(verdict, Verdict)
    assert verdict.reward == 1.0
    whole = Scripted("5", "6")
    (verdict,) = played(guessing(url, observation_field=None), (task, whole))
    assert whole.read[:2] == ['{"hint": "a number below 10", "guesses": 0}\n', '\n{"hint": "more", "guesses": 1}\n']


def test_a_connection_outlives_the_pings_while_the_model_writes(url: str) -> None:
    async def write() -> None:
        await asyncio.sleep(3 * PING_S + PATIENCE_S)

    (verdict,) = played(guessing(url), ({"reset": {"seed": 0}}, Scripted("0", before_reply=write)))
    assert isinstance(verdict, Verdict)
    assert verdict.reward == 1.0


def test_a_failure_costs_its_episode_and_says_what_to_do(url: str, start_server: Start) -> None:
    task: dict[str, Any] = {"reset": {"seed": 0}}
    cases = [
        ({}, "raise", EpisodeError, "a step failed on the server: this step is broken (EXECUTION_ERROR)"),
        ({"call_time_limit_s": 5}, "hang", DeadlineExceededError, "took longer than 5 s"),
        ({"action_field": "text"}, "0", ConfigError, "GET /schema"),
        ({"observation_field": "text"}, "0", ConfigError, "has no field 'text', but metadata, hint, "),
    ]
    for options, guess, kind, says in cases:
        failed, other = played(guessing(url, **options), (task, Scripted(guess)), (task, Scripted("0")))
        assert isinstance(failed, kind), failed
        assert says in str(failed)
        assert isinstance(other, Verdict) or options
    dying = start_server(SESSIONS)
    (failed,) = played(guessing(dying, begin_time_limit_s=120), (task, Scripted("die")))
    assert isinstance(failed, PeerLostError), failed
    (failed,) = played(guessing(dying, begin_time_limit_s=1), (task, Scripted("0")))
    assert isinstance(failed, TransportError)
    assert "no episode could be begun within 1 s" in str(failed)
    assert "Start the server" in str(failed)


def test_what_is_no_server_of_openenv_is_named() -> None:
    from websockets.asyncio.server import serve

    async def play(answer: str) -> BaseException:
        async def talk(connection: Any) -> None:
            await connection.recv()
            await (connection.send(answer) if answer else connection.wait_closed())

        async with serve(talk, "127.0.0.1", 0) as server:
            port = server.sockets[0].getsockname()[1]
            made = guessing(f"ws://127.0.0.1:{port}", call_time_limit_s=60 if answer else 0.1)
            expected = (
                (ProtocolError, "no message of OpenEnv") if answer else (DeadlineExceededError, "a reset took longer")
            )
            with pytest.raises(expected[0], match=expected[1]) as failed:
                await made.play({}, Scripted("0"))
        return failed.value

    for answer in (
        "",
        "hello",
        "[]",
        '{"type": "observation", "data": {"reward": 1}}',
        '{"type": "error", "data": "no"}',
    ):
        asyncio.run(play(answer))
    with pytest.raises(ConfigError, match="no address"):
        guessing("127.0.0.1:8000")
