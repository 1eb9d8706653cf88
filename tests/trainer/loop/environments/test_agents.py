"""Agents over the endpoint of a run: their calls are turns, token by token, and their faults cost an episode at most."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, cast

import httpx
import pytest
from agent_world import AGENTS, STOP, Agent, Saying, agent_of, ids, played, player_of, user
from loop_world import ALGORITHM, TASKS, Characters, World
from openai import APIStatusError, AsyncOpenAI
from waiting import HANG_S

from weightlane.ckpt_engines import ConfigError
from weightlane.trainer.data.sequences import IGNORED
from weightlane.trainer.loop.prompt_group import PromptGroup, to_batch
from weightlane.trainer.loop.protocols import Rollout

ADD = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}
CALL = '<tool_call>{"name": "add", "arguments": {"a": 2, "b": 3}}</tool_call>'
FIRST = f'So: {CALL}<tool_call>{{"name": "add"}}</tool_call>'
"""Of two calls, the agent gets one."""


async def converses(task: Mapping[str, Any], client: Mapping[str, str], *, keeps_text: bool = True) -> None:
    """Call a tool, read its answer in a stream, and let another conversation have a turn between."""
    async with AsyncOpenAI(**client) as openai:
        assert [model.id async for model in openai.models.list()] == ["policy"]
        ask = {"model": "gpt-9", "tools": [ADD], "temperature": 1, "n": 1, "parallel_tool_calls": False}
        messages: list[Any] = [{"role": "developer", "content": "Be brief."}, user(task["prompt"])]
        first = await openai.chat.completions.create(messages=messages, **cast("Any", ask))
        (call,) = first.choices[0].message.tool_calls or ()
        assert (call.function.name, json.loads(call.function.arguments)) == ("add", {"a": 2, "b": 3})
        assert (first.choices[0].finish_reason, first.model) == ("tool_calls", "gpt-9")
        assert first.usage
        assert first.usage.completion_tokens == len(FIRST) + 1
        said = first.choices[0].message
        assert said.content == "So: "
        other = await openai.chat.completions.create(model="", messages=[user("aside")], max_completion_tokens=5)
        assert (other.choices[0].message.content, other.choices[0].finish_reason) == ("reply", "length")
        if not keeps_text:
            said.content = None
        messages += [said, {"role": "tool", "tool_call_id": call.id, "content": "5"}]
        parts = {"content": [{"type": "text", "text": "and "}, {"type": "text", "text": "now?"}], "role": "user"}
        stream = await openai.chat.completions.create(
            messages=[*messages, parts], stream=True, stream_options={"include_usage": True}, **cast("Any", ask)
        )
        chunks = [chunk async for chunk in stream]
        text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
        assert text == "It is 5."
        assert chunks[-1].usage
        assert chunks[-1].usage.prompt_tokens > first.usage.total_tokens
        # Blanks around what it wrote do not make it another message.
        messages += [parts, {"role": "assistant", "content": f"{text}\n", "refusal": None}, user("Sure?")]
        last = await openai.chat.completions.create(messages=messages, **cast("Any", ask))
        assert last.choices[0].message.content == "Yes."


@pytest.mark.parametrize("keeps_text", [True, False])
def test_calls_are_turns_whose_tokens_are_those_that_the_replica_read_and_wrote(
    tmp_path: Path, *, keeps_text: bool
) -> None:
    found, rollout = played(
        tmp_path,
        partial(converses, keeps_text=keeps_text),
        FIRST,
        "reply 1",
        "It is 5.",
        "Yes.",
        judge=lambda text, task: len(text),
    )
    assert found.error is None
    assert found.reward == len("Yes.")
    main, aside = found.trajectory.sequences
    first, second, third = main.turns
    opening = ids("1 tools<system>Be brief.\0<user>task-0\0<assistant>")
    assert first.read_ids == opening
    assert second.read_ids == ids("<tool>5\0<user>and now?\0<assistant>")
    assert third.read_ids == ids("<user>Sure?\0<assistant>")
    assert (aside.whole, aside.token_ids) == (ids("0 tools<user>aside\0<assistant>reply"), ids("reply"))
    assert [tokens for _, tokens in rollout.said] == [
        list(turn.completion.token_ids) for turn in found.trajectory.turns
    ]
    whole = [*opening, *ids(FIRST), STOP, *second.read_ids, *ids("It is 5."), STOP, *third.read_ids]
    assert rollout.said[-1][0] == whole, "the prompt is all that was read and written, as it was"


async def rewrites(task: Mapping[str, Any], client: Mapping[str, str]) -> float:
    """Ask again, change what was said, go on with something older, and with other tools."""
    async with AsyncOpenAI(**client) as openai:

        async def ask(*messages: Any, **more: Any) -> Any:
            made = await openai.chat.completions.create(model="", messages=messages, **more)
            return made.choices[0].message

        prompt = user(task["prompt"])
        first = await ask(prompt)
        second = await ask(prompt, first, user("more"))
        await ask(prompt, first, user("otherwise"))
        await ask(prompt, first, user("more"), second, user("and more"))
        await ask(prompt, {"role": "assistant", "content": "never said"}, user("more"))
        await ask(prompt)
        await ask(prompt, first, user("more"), tools=[{"type": "function", "function": {"name": "add"}}])
    return 1.0


def test_a_rewritten_conversation_is_a_further_sequence_and_each_generated_token_is_trained_once(
    tmp_path: Path,
) -> None:
    found, rollout = played(tmp_path, rewrites, options={"reward": "agent"})
    assert found.error is None
    kept, forked, told, again, tooled = found.trajectory.sequences
    assert [len(each.turns) for each in (kept, forked, told, again, tooled)] == [3, 1, 1, 1, 1]
    assert Characters().decode(tooled.turns[0].read_ids).startswith("1 tools"), (
        "as the template begins with these tools"
    )
    until_first = kept.turns[0].read_ids + kept.turns[0].completion.token_ids
    assert forked.turns[0].read_ids == [*until_first, *ids("<user>otherwise\0<assistant>")]
    assert "never said" in Characters().decode(told.turns[0].read_ids)
    assert again.turns[0].read_ids == kept.turns[0].read_ids
    algorithm = ALGORITHM.model_copy(update={"compute_zero_advantage": True, "group_size": 2})
    batch, (part,) = to_batch([PromptGroup(TASKS[0], [found, found], "rollout-0")], algorithm)
    assert (len(batch), part.sequences) == (10, 10)
    trained = []
    for sequence in batch.sequences[:5]:
        tokens, targets = sequence.tokens.tolist(), sequence.targets.tolist()
        places = [place for place, target in enumerate(targets) if target != IGNORED]
        assert all(tokens[place + 1] == targets[place] for place in places if place + 1 < len(tokens))
        trained += [targets[place] for place in places]
    order = [turn for each in found.trajectory.sequences for turn in each.turns]
    assert trained == [token for turn in order for token in turn.completion.token_ids]
    assert sorted(trained) == sorted(token for _, tokens in rollout.said for token in tokens)


async def errors_of(client: Mapping[str, str], *asked: Mapping[str, Any]) -> list[APIStatusError]:
    raised = []
    async with AsyncOpenAI(**client, max_retries=2) as openai:
        for each in asked:
            body = {"model": "", "messages": [user("x")], **each}
            with pytest.raises(APIStatusError) as error:
                await openai.post("/chat/completions", body=body, cast_to=object)
            raised.append(error.value)
    return raised


def test_a_call_that_cannot_be_served_is_refused_in_openais_words_and_costs_nothing(tmp_path: Path) -> None:
    refused: list[tuple[Mapping[str, Any], str]] = [
        ({"n": 2}, "n = 2 is not offered"),
        ({"temperature": 0.5}, r"temperature is 0.5, and the run samples with 1 (algorithm.temperature)"),
        ({"logit_bias": {"5": 1}}, "logit_bias would draw tokens from another distribution"),
        ({"top_p": 0.9}, "top_p would draw"),
        ({"seed": 1}, "seed would draw"),
        ({"stop": ["x"]}, "stop would draw"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"guided_json": {}}, "the parameter 'guided_json' is unknown here"),
        ({"max_tokens": 0}, "positive number"),
        ({"messages": []}, "at least one message"),
        ({"messages": [{"role": "function", "content": "x"}]}, "messages[0] must be an object with one of the roles"),
        ({"messages": [user([{"type": "image_url", "image_url": {}}])]}, "its content must be text"),
        ({"messages": [{"role": "assistant", "tool_calls": [{"id": "1"}]}]}, "a tool call must have id"),
        ({"tools": ["add"]}, "tools must be a list of functions"),
        ({"messages": [{"role": "assistant", "tool_calls": 5}]}, "tool_calls must be a list"),
        ({"chat_template_kwargs": {"after": 0}}, "chat_template_kwargs must be an object without add_gen"),
    ]

    async def agent(task: Mapping[str, Any], client: Mapping[str, str]) -> float:
        errors = await errors_of(client, *(each for each, _ in refused))
        for error, (_, says) in zip(errors, refused, strict=True):
            assert error.status_code == 400
            assert says in error.message
            assert error.type == "invalid_request_error"
        (stranger,) = await errors_of({**client, "api_key": "sk-unknown"}, {})
        assert (stranger.status_code, stranger.code) == (401, "invalid_api_key")
        async with httpx.AsyncClient(headers={"Authorization": f"Bearer {client['api_key']}"}) as http:
            half = b'{"messages": [{"role": "user", "content": "\\ud83d"}]}'
            answer = await http.post(f"{client['base_url']}/chat/completions", content=half)
            assert (answer.status_code, "surrogates not allowed" in answer.text) == (400, True)
        async with AsyncOpenAI(**client) as openai:
            with pytest.raises(APIStatusError, match="not offered here") as missing:
                await openai.embeddings.create(model="", input="x")
            assert missing.value.status_code == 404
            await openai.chat.completions.create(model="", messages=[user("x")])
        return 1.0

    found, rollout = played(tmp_path, agent, options={"reward": "agent"})
    assert found.error is None
    assert (len(rollout.said), found.reward) == (1, 1.0)

    async def samples_otherwise(task: Mapping[str, Any], client: Mapping[str, str]) -> float:
        async with AsyncOpenAI(**client) as openai:
            await openai.chat.completions.create(model="", messages=[user("x")], temperature=0, top_p=0.5, seed=1)
        return 2.0

    found, _ = played(tmp_path, samples_otherwise, options={"reward": "agent", "other_sampling": "ignore"})
    assert found.reward == 2.0


def test_an_episode_that_ends_refuses_further_calls_and_is_judged_as_it_stands(tmp_path: Path) -> None:
    codes = []

    async def talks_on(task: Mapping[str, Any], client: Mapping[str, str]) -> None:
        messages = [user("go")]
        async with AsyncOpenAI(**client, max_retries=9) as openai:
            for _ in range(99):
                try:
                    made = await openai.chat.completions.create(model="", messages=cast("Any", messages))
                except APIStatusError as error:
                    codes.append((error.status_code, error.code))
                    (again,) = await errors_of(client, {})
                    codes.append((again.status_code, again.code))
                    raise
                messages += [made.choices[0].message, user("on")]

    over = (410, "episode_over")
    for limits, ended, first in (
        ({"max_turns": 3}, "turns", over),
        ({"max_model_len": 180, "max_turns": 99}, "full", (400, "context_length_exceeded")),
    ):
        found, _ = played(tmp_path, talks_on, judge=lambda text, task: 0.5, **limits)
        assert (found.error, found.reward, found.ended) == (None, 0.5, ended)
        assert codes == [first, over]
        codes.clear()
    late = []

    async def leaves_its_key(task: Mapping[str, Any], client: Mapping[str, str]) -> None:
        async with AsyncOpenAI(**client) as openai:
            await openai.chat.completions.create(model="", messages=[user("x")])
        late.append(client)

    async def two_episodes() -> None:
        AGENTS["current"] = leaves_its_key
        environment = agent_of(tmp_path, {"function": "agents_of_test:current"})
        player = player_of(environment)
        await player.play(cast("Rollout", Saying(World(), "rollout-0")), TASKS[0], greedy=False)
        (refused,) = await errors_of(late[0], {})
        assert (refused.status_code, refused.code, refused.message.count("has ended")) == (*over, 1)
        await environment.close()

    asyncio.run(two_episodes())


def test_a_call_that_is_given_up_or_outlives_its_agent_is_no_turn_and_its_generation_ends(tmp_path: Path) -> None:
    outlives = []

    async def gives_up(task: Mapping[str, Any], client: Mapping[str, str]) -> float:
        openai = AsyncOpenAI(**client)

        async def begun() -> asyncio.Task[Any]:
            asked = openai.chat.completions.create(model="", messages=[user("x")])
            asking = asyncio.create_task(cast("Any", asked))
            while not Saying.hanging:  # noqa: ASYNC110 - only this test waits for it
                await asyncio.sleep(0.01)
            return asking

        (await begun()).cancel()
        made = await openai.chat.completions.create(model="", messages=[user("x")])
        assert made.choices[0].message.content == "kept"
        outlives.append(await begun())
        return 1.0

    texts, limits = ["HANGS", "kept", "HANGS"], {"max_turns": 2, "turn_time_limit_s": HANG_S}
    found, rollout = played(tmp_path, gives_up, *texts, options={"reward": "agent"}, **limits)
    assert (found.error, found.reward, found.ended, rollout.hanging) == (None, 1.0, "", 0)
    assert [turn.completion.token_ids for turn in found.trajectory.turns] == [[*ids("kept"), STOP]]


async def makes_no_call(task: Mapping[str, Any], client: Mapping[str, str]) -> float:
    return 1.0


async def gives_no_reward(task: Mapping[str, Any], client: Mapping[str, str]) -> str:
    async with AsyncOpenAI(**client) as openai:
        await openai.chat.completions.create(model="", messages=[user("x")])
    return "good"


async def raises(task: Mapping[str, Any], client: Mapping[str, str]) -> str:
    raise OSError("no simulator")


async def asks_a_replica_that_fails(task: Mapping[str, Any], client: Mapping[str, str]) -> None:
    (refused,) = await errors_of(client, {})
    assert refused.status_code == 410
    await asyncio.sleep(1e6)


async def asks_a_broken_replica(task: Mapping[str, Any], client: Mapping[str, str]) -> None:
    await asks_a_replica_that_fails(task, client)


async def is_read_by_a_broken_parser(task: Mapping[str, Any], client: Mapping[str, str]) -> None:
    (refused,) = await errors_of(client, {"tools": [ADD]})
    assert refused.status_code == 410
    await asyncio.sleep(1e6)


async def exits(task: Mapping[str, Any], client: Mapping[str, str]) -> None:
    raise SystemExit(3)


def exits_in_a_thread(task: Mapping[str, Any], client: Mapping[str, str]) -> None:
    raise SystemExit("no model")


def parse(text: str) -> Sequence[Any]:
    raise KeyError(text)


def hangs_in_a_thread(task: Mapping[str, Any], client: Mapping[str, str]) -> None:
    import threading

    threading.Event().wait()


@pytest.mark.parametrize(
    ("agent", "kind", "says"),
    [
        (makes_no_call, "environment", "the agent ended without a call"),
        (gives_no_reward, "environment", "the agent gave no reward, but 'good'"),
        (raises, "environment", "OSError: no simulator"),
        (asks_a_replica_that_fails, "request", "request 3 took longer"),
        (asks_a_broken_replica, "request", "unexpected KeyError: 'BROKEN'"),
        (is_read_by_a_broken_parser, "environment", "environment.options.format raised KeyError: 'reply 0'"),
        (exits, "environment", "the agent left by exit(3)"),
        (exits_in_a_thread, "environment", "the agent left by exit('no model')"),
        (hangs_in_a_thread, "environment", "ended by environment.turn_time_limit_s, 0.5 s"),
        (["python", "-c", "raise SystemExit('no model')"], "environment", "the agent ended with status 1: no model"),
    ],
)
def test_a_fault_of_an_agent_is_a_typed_error_of_its_episode(
    agent: Agent | Sequence[str], kind: str, says: str, tmp_path: Path
) -> None:
    texts = ["DEADLINE"] if agent is asks_a_replica_that_fails else ["BROKEN"] if agent is asks_a_broken_replica else []
    options = {"reward": "agent"}
    if agent is is_read_by_a_broken_parser:
        AGENTS["parse"], options["format"] = cast("Any", parse), "agents_of_test:parse"
    limit = 0.5 if agent is hangs_in_a_thread else HANG_S
    found, _ = played(tmp_path, agent, *texts, options=options, turn_time_limit_s=limit)
    assert found.error is not None
    assert found.kind == kind
    assert says in str(found.error)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({}, "an agent is a command or a function"),
        ({"command": ["python"], "function": "x:y"}, "an agent is a command or a function"),
        ({"command": ["no-such-program"]}, "there is no program 'no-such-program'"),
        ({"command": ["./missing"]}, "there is no program"),
        ({"command": ["true"], "preload": ["openai"]}, "preload is for a command that is python and a script"),
        ({"function": "no_such_module:f"}, "no_such_module"),
        ({"command": ["true"], "host": "0.0.0.0"}, "is a wildcard, on which no peer can connect"),
        ({"command": ["true"], "host": "a..b"}, "can be no host's name"),
        ({"command": ["true"], "format": "xml"}, "no tool format 'xml'"),
    ],
)
def test_an_agent_that_cannot_play_is_refused_before_the_run(
    options: Mapping[str, Any], says: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=says):
        agent_of(tmp_path, options)
