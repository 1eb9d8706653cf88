"""The environment ``textarena`` beside TextArena's engine: what is said, rewards, invalid moves and random numbers."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import textarena as ta
from episodes import MOST_S, Scripted, environment, played

from weightlane.ckpt_engines import ConfigError, DeadlineExceededError
from weightlane.trainer.loop.environments import Verdict

GAMES = {
    "GuessTheNumber-v0": [str(number) for number in range(1, 13)],
    "GuessTheNumber-v0-hardcore": ["[7]", "I say 9", "[9] or so", "nothing", "nothing"],
    "Bandit-v0": ["red", "blue", "[green]"] * 7,
    "2048-v0-ultra-easy": ["Up", "Left", "Down", "Right"] * 30,
    "FrozenLake-v0-random": ["right", "down", "left", "down", "right", "right"] * 4,
    "Mastermind-v0": ["1 2 3 4", "2 3 4 5", "1 1 1 1", "3 4 5 6"],
    "Blackjack-v0": ["Hit", "Stand"] * 20,
    "TowerOfHanoi-v0": ["A C", "A B", "C B", "A C", "B A", "B C", "A C"],
    "LightsOut-v0": ["0 0", "1 1", "9 9", "9 9"],
    "Sokoban-v0": ["up", "left", "down", "right"] * 9,
}


def by_the_engine(game: str, seed: int, moves: list[str]) -> tuple[list[str], Any, dict[str, Any], int]:
    """What the engine says, by its unwrapped observations; its rewards and information; and how many moves it took."""
    random.seed(seed)
    np.random.seed(seed)
    acting = ta.make(game)
    env = acting
    while isinstance(env, ta.Wrapper):
        env = env.env
    acting.reset(num_players=1, seed=seed)
    said, taken = [], 0

    def listen() -> None:
        _, seen = env.get_observation()
        said.append("\n".join(text for _, text, kind in seen if kind is not ta.ObservationType.PLAYER_ACTION))

    listen()
    for move in moves:
        done, _ = acting.step(move)
        taken += 1
        if done:
            break
        listen()
    return said, *env.close(), taken


def test_games_are_the_engines_own_also_when_many_are_played_at_once() -> None:
    """Games draw from generators that a process has one of: mixed up, they would not be those of their seeds."""
    episodes, expected = [], []
    for game, moves in GAMES.items():
        for seed in (3, 4, 3):
            episodes.append(({"game": game, "seed": seed, "messages": []}, Scripted(*moves)))
            expected.append(by_the_engine(game, seed, moves))
    verdicts = played(environment("textarena", processes=2, unfinished_reward=-7, call_time_limit_s=MOST_S), *episodes)
    for (task, episode), verdict, (said, rewards, info, taken) in zip(episodes, verdicts, expected, strict=True):
        assert isinstance(verdict, Verdict), (task, verdict)
        assert episode.read == [[{"role": "user", "content": text}] for text in said], task
        assert len(GAMES[task["game"]]) - len(episode.texts) == taken
        assert verdict.reward == (-7 if rewards is None else rewards[0]), task
        assert verdict.metrics == {
            "moves": info[0]["turn_count"],
            "finished": float(rewards is not None),
            "invalid_move": float(info[0]["invalid_move"]),
        }
    ends = {(bool(rewards), info[0]["invalid_move"]) for _, rewards, info, _ in expected}
    assert ends == {(True, False), (True, True), (False, False)}, "not every way to end has been played"


def test_an_invalid_move_is_what_the_engine_makes_of_it_and_text_models_read_text() -> None:
    task = {"seed": 1, "prompt": "GuessTheNumber-v0 1", "answer": ""}
    episode = Scripted("<think>[3]</think>no number!]", "</think>still none]")
    made = environment("textarena", game="GuessTheNumber-v0", after="</think>", text="<<{observation}>>")
    (verdict,) = played(made, (task, episode))
    first, second = episode.read
    assert first.startswith("<<You are Player 0. You are playing Guess The Number.")
    assert "You attempted an invalid move." in second
    assert second.endswith(">>")
    assert isinstance(verdict, Verdict)
    assert verdict.metrics == {"moves": 1, "finished": 1.0, "invalid_move": 1.0}


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"game": "GuesTheNumber-v0"}, "no game 'GuesTheNumber-v0'. Is it one of GuessTheNumber-v0"),
        ({"game": "Chess-v0"}, "cannot be started for one player"),
        ({"game": "Bandit-v0", "game_options": {"colour": 1}}, "cannot be started.*colour"),
    ],
)
def test_a_game_that_cannot_be_played_alone_is_refused_before_the_run(options: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        environment("textarena", **options)


def test_a_failure_costs_its_episode_only() -> None:
    fine = {"game": "GuessTheNumber-v0", "seed": 1}
    broken = [{"game": "Nim-v9", "seed": 1}, {"seed": 1}, {"game": "GuessTheNumber-v0", "seed": "1"}]
    made = environment("textarena")
    *failed, other = played(made, *((task, Scripted("1")) for task in [*broken, fine]))
    assert [type(each) for each in failed] == [ConfigError] * 3
    assert isinstance(other, Verdict)
    with pytest.raises(DeadlineExceededError, match="call_time_limit_s"):
        environment("textarena", game="GuessTheNumber-v0", call_time_limit_s=1e-5)
