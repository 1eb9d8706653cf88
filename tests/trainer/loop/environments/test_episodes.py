"""Episodes in the loop: what is trained is what the replica read and wrote, and every fault costs its sample, or nothing."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from loop_world import ALGORITHM, TASKS, Characters, LiveRollout, World, first_is_better, judging, run
from simulated_time import SimulatedTimeLoop

from weightlane.ckpt_engines import ConfigError, DeadlineExceededError, EpisodeError, WorkerDiedError
from weightlane.sync import ReplicaState
from weightlane.trainer.config import EnvironmentConfig
from weightlane.trainer.data.sequences import IGNORED, TokenSequence
from weightlane.trainer.data.tasks import Task
from weightlane.trainer.loop.environments import Environment, EnvironmentContext, EpisodeView, Options, Verdict
from weightlane.trainer.loop.environments.player import Player
from weightlane.trainer.loop.environments.registry import make_environment
from weightlane.trainer.loop.environments.single_turn import SingleTurn
from weightlane.trainer.loop.protocols import Played, Rollout

STOP = 0
CONTEXT = EnvironmentContext()


class TalkingRollout(LiveRollout):
    """Writes random tokens, ended by the stop token or not, and keeps what it was asked and what it wrote."""

    def __init__(self, world: World, name: str, dies_at: int = -1) -> None:
        super().__init__(world, name)
        self.dies_at = dies_at
        self.said: list[tuple[tuple[int, ...], tuple[int, ...], tuple[float, ...]]] = []
        self.draws = random.Random(name)

    def draws_for(self, prompt_ids: Sequence[int]) -> random.Random:
        return self.draws

    async def generate(self, request_id: str, prompt_ids: Sequence[int], max_new_tokens: int, **options: Any) -> Any:
        assert options["stop_ids"] == [STOP]
        await asyncio.sleep(0.001)
        if len(self.said) == self.dies_at:
            self.gone.set()
        if self.gone.is_set():
            raise self.death
        draws = self.draws_for(prompt_ids)
        count = draws.randint(1, max_new_tokens)
        tokens = [draws.randint(65, 90) for _ in range(count)]
        if count < max_new_tokens:
            tokens[-1] = STOP
        logprobs = [-draws.random() for _ in tokens]
        self.said.append((tuple(prompt_ids), tuple(tokens), tuple(logprobs)))
        versions = [self.version] * count
        return SimpleNamespace(
            token_ids=tokens, logprobs=logprobs, versions=versions, cached_tokens=len(prompt_ids) // 2
        )


class Asking(Environment):
    """Asks again, with the length of the reply, three times."""

    async def play(self, task: Mapping[str, Any], episode: EpisodeView) -> Verdict:
        reply = await episode.reply([{"role": "user", "content": task["prompt"]}], tools=[{}])
        for _ in range(3):
            if reply.is_last:
                break
            last, reply = reply, await episode.reply([{"role": "tool", "content": str(len(reply.text))}])
        return Verdict(float(len(last.text)), {"asked": 3})


def player_of(
    environment: Environment, *, max_model_len: int = 400, judge: Any = first_is_better, **limits: Any
) -> Player:
    return Player(
        environment,
        EnvironmentConfig(name="asking", **limits),
        ALGORITHM,
        tokenizer=Characters(),
        stop_token_ids=[STOP],
        judge=judging(judge),
        max_model_len=max_model_len,
    )


def talking(names: Sequence[str] = ("rollout-0",), **dies_at: int) -> tuple[World, list[TalkingRollout]]:
    world = World()
    rollouts = [TalkingRollout(world, name, dies_at.get(name.replace("-", "_"), -1)) for name in names]
    world.replicas, world.states_ = {}, {}
    for rollout in rollouts:
        world.add(rollout)
    return world, rollouts


def written_parts(sequence: TokenSequence) -> list[tuple[tuple[int, ...], tuple[int, ...], tuple[float, ...]]]:
    """Split a sequence into its runs of targets: the tokens before each, the targets, and their log-probabilities."""
    tokens, targets = sequence.tokens.tolist(), sequence.targets.tolist()
    values = sequence.per_token["rollout_logprobs"].tolist()
    whole = [*tokens, targets[-1]]
    parts, begin = [], None
    for place, target in enumerate([*targets, IGNORED]):
        if target != IGNORED and begin is None:
            begin = place
        if target == IGNORED and begin is not None:
            ids, logprobs = tuple(targets[begin:place]), tuple(values[begin:place])
            assert ids == tuple(whole[begin + 1 : place + 1]), "a target is the token that is read next"
            parts.append((tuple(whole[: begin + 1]), ids, logprobs))
            begin = None
    return parts


def test_trained_tokens_are_exactly_those_that_the_replicas_read_and_wrote() -> None:
    world, (rollout,) = talking()
    everything = ALGORITHM.model_copy(update={"compute_zero_advantage": True})
    run(world, first_is_better, player=player_of(Asking(Options(), CONTEXT)), algorithm=everything, heldout={})
    said = {(read, wrote, tuple(torch.tensor(logprobs).tolist())) for read, wrote, logprobs in rollout.said}
    trained = [written_parts(sequence) for batch in world.batches for sequence in batch.sequences]
    assert len(trained) == 6 * ALGORITHM.prompts_per_step * ALGORITHM.group_size
    assert {len(parts) for parts in trained} == {4}
    assert all(set(parts) <= said for parts in trained)
    ends = Counter(wrote[-1] == STOP for _, wrote, _ in rollout.said)
    assert min(ends[True], ends[False]) > 20, "both kinds of ends were continued"
    for parts in trained:
        for (before, wrote, _), (after, *_) in pairwise(parts):
            answer = "".join(map(chr, after[len(before) + len(wrote) :]))
            length = len(wrote) - (wrote[-1] == STOP)
            assert answer == ("" if wrote[-1] == STOP else "\0") + f"<tool>{length}\0<assistant>"
    facts = world.steps[-1]
    assert (facts["turns"], facts["environment/asked"], facts["full"]) == (4, 3, 0)
    assert 0 < facts["prefix_reuse"] < 1
    assert world.samples[0][1][0]["turns"] == 4


def test_the_environment_of_one_turn_trains_what_a_run_without_one_trains() -> None:
    class Repeating(TalkingRollout):
        """Draws the same completions for a prompt, whichever way it is asked."""

        def draws_for(self, prompt_ids: Sequence[int]) -> random.Random:
            asked[tuple(prompt_ids)] += 1
            return random.Random(f"{prompt_ids} {asked[tuple(prompt_ids)]}")

        async def generate_group(self, prompt_ids: Sequence[int], *, count: int, **options: Any) -> Sequence[Any]:
            options["stop_ids"] = options.pop("stop_token_ids")
            return [await self.generate("", prompt_ids, **options) for _ in range(count)]

    def judge(completion: str, task: Mapping[str, Any]) -> float:
        return len(completion)

    batches = []
    for player in (None, player_of(SingleTurn(Options(), CONTEXT), judge=judge)):
        world, asked = World(), Counter[tuple[int, ...]]()
        world.replicas["rollout-0"] = Repeating(world, "rollout-0")
        run(world, judge, player=player, max_staleness=0, heldout={})
        batches.append([sequence for batch in world.batches for sequence in batch.sequences])
    assert len(batches[0]) == len(batches[1]) > 20
    for plain, played in zip(*batches, strict=True):
        assert torch.equal(plain.tokens, played.tokens)
        assert torch.equal(plain.targets, played.targets)
        assert plain.per_sequence == played.per_sequence
        assert all(torch.equal(plain.per_token[name], played.per_token[name]) for name in plain.per_token)


def test_a_replica_that_dies_between_turns_costs_no_task_and_no_turn_goes_to_another_replica() -> None:
    world, rollouts = talking(("rollout-0", "rollout-1"), rollout_1=17)
    everything = ALGORITHM.model_copy(update={"compute_zero_advantage": True})
    player = player_of(Asking(Options(), CONTEXT))
    run(world, first_is_better, player=player, algorithm=everything, heldout={}, quorum=0.5)
    assert world.states_["rollout-1"] is ReplicaState.LOST
    assert world.failures == []
    trained = [written_parts(sequence) for batch in world.batches for sequence in batch.sequences]
    said = [{(read, wrote) for read, wrote, _ in rollout.said} for rollout in rollouts]
    assert all(any({part[:2] for part in parts} <= here for here in said) for parts in trained)
    assert sorted(Counter(parts[0][0] for parts in trained).values()) == [ALGORITHM.group_size] * len(TASKS)


Play = Callable[[Mapping[str, Any], EpisodeView], Any]


async def raises(task: Mapping[str, Any], episode: EpisodeView) -> Any:
    await episode.reply()
    raise KeyError("board")


async def leaves(task: Mapping[str, Any], episode: EpisodeView) -> Any:
    raise SystemExit(3)


async def never_asks(task: Mapping[str, Any], episode: EpisodeView) -> Any:
    return Verdict(1.0)


async def gives_no_number(task: Mapping[str, Any], episode: EpisodeView) -> Any:
    await episode.reply()
    return Verdict(float("nan"))


async def gives_no_verdict(task: Mapping[str, Any], episode: EpisodeView) -> Any:
    await episode.reply()
    return 1.0


async def waits(task: Mapping[str, Any], episode: EpisodeView) -> Any:
    await episode.reply()
    await asyncio.sleep(70)


async def waits_whatever_happens(task: Mapping[str, Any], episode: EpisodeView) -> Any:
    while True:
        try:
            await episode.reply()
            await asyncio.sleep(70)
        except (asyncio.CancelledError, EpisodeError):
            await asyncio.sleep(1e6)


async def takes_many_turns(task: Mapping[str, Any], episode: EpisodeView) -> Any:
    for _ in range(100):
        await episode.reply("more")
        await asyncio.sleep(50)
    return Verdict(1.0)


async def asks_after_the_end(task: Mapping[str, Any], episode: EpisodeView) -> Any:
    while True:
        await episode.reply("x" * 60)


async def asks_twice_at_once(task: Mapping[str, Any], episode: EpisodeView) -> Any:
    await asyncio.gather(episode.reply(), episode.reply())


async def cancels_itself(task: Mapping[str, Any], episode: EpisodeView) -> Any:
    raise asyncio.CancelledError


async def swallows(task: Mapping[str, Any], episode: EpisodeView) -> Any:
    try:
        await episode.reply("late")
    except DeadlineExceededError:
        return Verdict(1.0)


async def has_no_room(task: Mapping[str, Any], episode: EpisodeView) -> Any:
    await episode.reply("x" * 1000)


def played(play: Play, **limits: Any) -> Played:
    class Playing(Environment):
        async def play(self, task: Mapping[str, Any], episode: EpisodeView) -> Verdict:
            return cast("Verdict", await play(task, episode))

    class Slow(TalkingRollout):
        async def generate(self, request_id: str, prompt_ids: Sequence[int], *args: Any, **options: Any) -> Any:
            if Characters().decode(prompt_ids) == "late":
                raise DeadlineExceededError("request 3 took longer than 600 s.", part="rollout-0")
            return await super().generate(request_id, prompt_ids, *args, **options)

    async def main() -> Played:
        player = player_of(Playing(Options(), CONTEXT), **limits)
        return await player.play(cast("Rollout", Slow(World(), "rollout-0")), TASKS[0], greedy=False)

    with asyncio.Runner(loop_factory=SimulatedTimeLoop) as runner:
        return runner.run(main())


@pytest.mark.parametrize(
    ("play", "kind", "says", "turns"),
    [
        (raises, "environment", "it raised KeyError: 'board' for prompt 'task-0'", 1),
        (leaves, "environment", "SystemExit: 3", 0),
        (never_asks, "environment", "without a reply", 0),
        (gives_no_number, "environment", "its reward is nan", 1),
        (gives_no_verdict, "environment", "1.0, which is no Verdict", 1),
        (waits, "environment", r"turn 2 of an episode ended by environment.turn_time_limit_s, 60 s", 1),
        (waits_whatever_happens, "environment", "turn_time_limit_s, 60 s", 1),
        (takes_many_turns, "environment", r"turn 5 of an episode ended by environment.episode_time_limit_s, 200 s", 4),
        (asks_after_the_end, "environment", "asks an episode for a reply, and it is over", 6),
        (asks_twice_at_once, "environment", "its last reply is still being written", 0),
        (cancels_itself, "environment", "it cancelled itself", 0),
        (swallows, "request", "request 3 took longer", 0),
        (has_no_room, "prompt", "the prompt has 1000 tokens", 0),
    ],
)
def test_a_fault_of_an_environment_is_a_typed_error_of_its_episode(
    play: Play, kind: str, says: str, turns: int
) -> None:
    found = played(play, turn_time_limit_s=60, episode_time_limit_s=200, max_model_len=400)
    assert found.error is not None
    assert found.error.part
    assert (found.kind, len(found.trajectory.turns)) == (kind, turns)
    assert says in str(found.error)


@pytest.mark.parametrize(
    ("limits", "ended", "turns"),
    [({"max_turns": 3}, "turns", 3), ({"max_model_len": 30, "max_turns": 99}, "full", None)],
)
def test_an_episode_without_turns_or_room_left_is_judged_as_it_stands(
    limits: dict[str, Any], ended: str, turns: int | None
) -> None:
    async def talks(task: Mapping[str, Any], episode: EpisodeView) -> Any:
        while not (reply := await episode.reply("go")).is_last:
            assert reply.token_ids
        assert (reply.text, reply.ended) == ("", ended)
        return Verdict(0.5)

    found = played(talks, **limits)
    assert (found.error, found.reward, found.ended) == (None, 0.5, ended)
    assert turns in (None, len(found.trajectory.turns))
    assert len(found.trajectory.whole) <= limits.get("max_model_len", 400)


def test_faults_are_counted_and_the_group_trains_what_is_left() -> None:
    class Sometimes(Asking):
        async def play(self, task: Mapping[str, Any], episode: EpisodeView) -> Verdict:
            verdict = await super().play(task, episode)
            if task["prompt"] == "task-3" and not failed:
                failed.append(1)
                raise OSError("the simulator is gone")
            return verdict

    failed: list[int] = []
    world, _ = talking()
    summary = run(world, first_is_better, player=player_of(Sometimes(Options(), CONTEXT)), heldout={})
    assert summary.failures == {"environment": 1}
    ((kind, facts),) = world.failures
    assert (kind, facts["task"], facts["turns"]) == ("environment", "task-3", 4)
    assert "OSError: the simulator is gone" in facts["error"]
    assert summary.drawn_tokens > 0


OWN = """
from weightlane.trainer.loop.environments import Environment, Options, Verdict

class Counted(Options):
    rounds: int

class Own(Environment):
    options_type = Counted

    async def play(self, task, episode):
        return Verdict(float(self.options.rounds))

class Half(Environment):
    pass
"""


def test_environments_are_found_by_name_or_in_a_module_of_ones_own_and_refused_with_the_reason(tmp_path: Path) -> None:
    (tmp_path / "own_environment.py").write_text(OWN)
    context = EnvironmentContext([tmp_path])

    def made(name: str | None, **options: Any) -> Environment | None:
        return make_environment(EnvironmentConfig(name=name, options=options), context)

    assert made(None) is None
    assert isinstance(made("single_turn"), SingleTurn)
    own = made("own_environment:Own", rounds=3)
    assert own is not None
    assert own.options.rounds == 3
    for name, options, says in (
        ("single_tune", {}, r"no environment is called 'single_tune'.*Did you mean 'single_turn'.*tools"),
        ("own_environment:Own", {}, r"environment.options.rounds: Field required"),
        (
            "own_environment:Own",
            {"rounds": 1, "round": 2},
            r"environment.options.round: Extra inputs.*Its options: rounds",
        ),
        ("own_environment:Half", {}, "does not implement play"),
        ("own_environment:Counted", {}, "not a subclass of Environment"),
        ("own_environment:Missing", {}, "has no 'Missing'"),
    ):
        with pytest.raises(ConfigError, match=says):
            made(name, **options)


def test_the_death_of_the_last_replica_in_an_episode_ends_the_run() -> None:
    world, _ = talking(rollout_0=9)
    with pytest.raises(WorkerDiedError):
        run(world, first_is_better, player=player_of(Asking(Options(), CONTEXT)), heldout={}, tasks=[Task("task", "")])
