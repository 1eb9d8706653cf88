"""Environments of verifiers play episodes of a run over its endpoint; what the model says is given, the rest is real."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
from agent_world import ids, played_at_once, task_of

from weightlane.ckpt_engines import ConfigError, EpisodeError

OPTIONS = {"function": "weightlane_verifiers:play", "reward": "agent"}


def tasks_of(environment: str, out: Path, train: int, heldout: int) -> list[str]:
    from weightlane_verifiers.__main__ import main

    main(["tasks", environment, "--out", str(out), "--train", str(train), "--heldout", str(heldout)])
    return [line for name in ("heldout", "train") for line in (out / f"{name}.jsonl").read_text().splitlines()]


def engine(seed: int) -> Any:
    """TextArena's own game, without verifiers."""
    import textarena

    random.seed(seed)
    game = textarena.make(env_id="Hangman-v0")
    game.reset(num_players=1)
    return game


def outcome(moves: list[str], seed: int) -> float:
    """The reward that TextArena's own engine gives for these replies."""
    game = engine(seed)
    for move in moves:
        game.step(move)
        if game.state.done:
            return float(game.state.rewards[0])
    raise AssertionError(moves)


def test_hangman_plays_its_turns_and_gives_the_rewards_of_its_engine(hangman: Path, tmp_path: Path) -> None:
    line = (hangman / "train.jsonl").read_text().splitlines()[0]
    seed = json.loads(line)["task"]["info"]["seed"]
    word = engine(seed).state.game_state["target_word"].upper()
    wins = [f"[{letter}]" for letter in dict.fromkeys(word)]
    moves = [wins, ["[Z]", wins[0], "no move", "nor this"], [f"[{letter}]" for letter in "BCDFGH"]]
    rewards = [outcome(replies, seed) for replies in moves]
    assert rewards[0] == 1 > rewards[1] > rewards[2] == 0
    found = played_at_once(tmp_path, OPTIONS, task_of(line), *moves, max_turns=20)
    assert [(one.error, one.reward, one.metrics) for one, _ in found] == [
        (None, reward, {"game_reward": reward}) for reward in rewards
    ]
    for (one, rollout), replies in zip(found, moves, strict=True):
        assert len(one.trajectory.sequences) == 1  # each turn goes on with the tokens of those before
        assert one.trajectory.token_ids == [token for _, wrote in rollout.said for token in wrote]
        assert len(rollout.said) <= len(replies)
        read, _ = rollout.said[0]
        assert "<system>You are a competitive game player" in "".join(map(chr, read))


def test_episodes_without_room_or_turns_are_judged_as_they_stand(hangman: Path, tmp_path: Path) -> None:
    task = task_of((hangman / "train.jsonl").read_text().splitlines()[0])
    for limits, ended in (({"max_turns": 2}, "turns"), ({"max_model_len": 1250}, "full")):
        moves = [[f"[{letter}]" for letter in "BCDFG"]]
        ((one, rollout),) = played_at_once(tmp_path, OPTIONS, task, *moves, **limits)
        assert (one.error, one.reward, one.ended) == (None, 0.0, ended)
        assert 0 < len(rollout.said) < 5


CALL = '<tool_call>{"name": "adder_%s", "arguments": {"x": %d, "y": 3}}</tool_call>'


def test_a_tool_is_called_a_weighted_reward_counts_and_a_failed_episode_says_why(tmp_path: Path) -> None:
    lines = tasks_of("adding", tmp_path / "adding", 9, 1)
    assert [json.loads(line)["task"]["prompt"] for line in lines] == ["2+3?", "1+4?"]  # the third is the first again
    episodes = [[CALL % ("add", 2), "five"], [CALL % ("sub", 2), "six"], ["crash"]]
    *found, (failed, _) = played_at_once(tmp_path, OPTIONS, task_of(lines[0]), *episodes)
    assert [(one.error, one.reward, one.metrics) for one, _ in found] == [
        (None, 0.5, {"right": 0.5}),
        (None, 0.0, {"right": 0.0}),
    ]
    for (_, rollout), answer in zip(found, ("5", "error: unknown tool 'adder_sub'"), strict=True):
        assert rollout.said[1][0][-len(f"<tool>{answer}\0<assistant>") :] == ids(f"<tool>{answer}\0<assistant>")
    assert type(failed.error) is EpisodeError
    assert "the judge is out" in str(failed.error)


def test_an_episode_whose_tool_server_dies_fails_and_does_not_hang(tmp_path: Path) -> None:
    task = task_of(tasks_of("adding", tmp_path / "adding", 9, 1)[0])
    ((one, rollout),) = played_at_once(tmp_path, OPTIONS, task, [CALL % ("add", -1), "five"])
    assert type(one.error) is EpisodeError
    assert "verifiers counts the episode as failed" in str(one.error)
    assert len(rollout.said) == 1


def test_an_environment_that_is_not_there_or_does_not_start_is_an_error_that_says_what_to_do(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        tasks_of("no-such-environment", tmp_path, 1, 1)
    said = capsys.readouterr().err
    assert "no-such-environment" in said
    assert "Install its package" in said
    (line, _) = tasks_of("adding", tmp_path / "adding", 9, 1)
    for spoil, kind, text in (
        ({"environment": {"taskset": {"id": "gone"}}}, ConfigError, "Install its package"),
        ({"environment": {"taskset": {"id": "adding"}, "id": "json"}}, ConfigError, "json"),
        ({"task": {"prompt": 3}}, EpisodeError, "prompt"),
        ({"task": None, "environment": None}, EpisodeError, "python -m weightlane_verifiers tasks"),
    ):
        changed = {key: value for key, value in {**json.loads(line), **spoil}.items() if value is not None}
        ((one, rollout),) = played_at_once(tmp_path, OPTIONS, task_of(json.dumps(changed)), ["five"])
        assert type(one.error) is kind
        assert text in str(one.error)
        assert not rollout.said
