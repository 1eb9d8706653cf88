"""Advantages by name, against formulas in Python floats; and those of a user's own function, checked."""

from __future__ import annotations

import re
import sys
import tomllib
from pathlib import Path
from statistics import fmean, pstdev

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from weightlane.ckpt_engines import ConfigError, ProtocolError
from weightlane.trainer import AlgorithmConfig, ScoredGroup
from weightlane.trainer.objectives.named_advantages import BUILT_IN, NamedAdvantages

Rewards = list[list[float]]
rewards_of: st.SearchStrategy[Rewards] = st.lists(
    st.lists(st.sampled_from([0.0, 0.1, 1.0]) | st.floats(-5, 5), min_size=2, max_size=6), min_size=1, max_size=4
)


def scored(rewards: Rewards) -> list[ScoredGroup]:
    """Groups with these rewards."""
    return [ScoredGroup(each, [3] * len(each), [False] * len(each), {"prompt": "p"}) for each in rewards]


def by_hand(name: str, rewards: Rewards) -> Rewards:
    """The published formula, one completion at a time. Equal numbers have an advantage of 0."""
    if name == "rloo":
        return [[each - fmean([*group[:at], *group[at + 1 :]]) for at, each in enumerate(group)] for group in rewards]
    if name == "group":
        return [[(each - fmean(group)) / (pstdev(group) + 1e-6) for each in group] for group in rewards]
    values = rewards
    if name == "reinforce_pp_baseline":
        values = [[each - fmean(group) for each in group] for group in rewards]
    every = [each for group in values for each in group]
    return [[(each - fmean(every)) / (pstdev(every) + 1e-6) for each in group] for group in values]


@pytest.mark.parametrize("name", sorted(BUILT_IN))
@given(rewards=rewards_of)
def test_built_in_advantages_are_those_of_the_papers_for_groups_of_any_sizes(name: str, rewards: Rewards) -> None:
    found = NamedAdvantages(AlgorithmConfig(advantages=name))(scored(rewards))
    for group, advantages, expected in zip(rewards, found, by_hand(name, rewards), strict=True):
        assert advantages == pytest.approx(expected, rel=1e-5, abs=2e-5)
        if name != "reinforce_pp" and len(set(group)) == 1:
            assert advantages == [0.0] * len(group), "exactly: such completions are not computed"


def test_dr_grpo_is_the_group_without_its_deviation() -> None:
    found = NamedAdvantages(AlgorithmConfig(normalize_std=False))(scored([[1.0, 0.0, 0.0, 0.0]]))
    assert found == [[0.75, -0.25, -0.25, -0.25]]


OWN = """
def shortest(groups):
    return [[reward / length for reward, length in zip(group.rewards, group.lengths)] for group in groups]

def broken(groups):
    return [group.reward for group in groups]

def few(groups):
    return [[0.0] for _ in groups]

def none(groups):
    return []

def huge(groups):
    return [[1e39] * len(group.rewards) for group in groups]
"""


def test_advantages_of_ones_own_are_found_beside_the_configuration_and_checked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "own_advantages.py").write_text(OWN)
    monkeypatch.setattr(sys, "path", [*sys.path])

    def own(function: str) -> NamedAdvantages:
        return NamedAdvantages(AlgorithmConfig(advantages=f"own_advantages:{function}"), [tmp_path])

    assert own("shortest")(scored([[3.0, 0.0], [6.0, 1.5]])) == [[1.0, 0.0], [2.0, 0.5]]
    for function, said in (
        ("broken", r"'own_advantages:broken' failed: AttributeError: .*no attribute 'reward'"),
        ("few", r"'own_advantages:few' of group 0 are \[0.0\], for the rewards \[1.0, 0.0\]"),
        ("none", "'own_advantages:none' are of 0 groups, and the batch has 1"),
        ("huge", r"'own_advantages:huge' of group 0 are \[inf, inf\].*finite in float32"),
    ):
        with pytest.raises(ProtocolError, match=said):
            own(function)(scored([[1.0, 0.0]]))
    for name, problem in (
        ("own_advantages:missing", "has no 'missing'"),
        (
            "rlo",
            r"algorithm.advantages is 'rlo', which is not built in. Did you mean 'rloo'\? Built in: group, reinforce_pp",
        ),
    ):
        with pytest.raises(ConfigError, match=problem):
            NamedAdvantages(AlgorithmConfig(advantages=name), [tmp_path])


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (
            {"objective": "ppo", "advantages": "rloo"},
            "advantages is rloo, and those of objective = ppo come from its critic",
        ),
        (
            {"advantages": "rloo", "normalize_std": False},
            "normalize_std is false, which is a setting of advantages = group",
        ),
        ({"refill": 1, "objective": "ppo"}, "refill is 1, and objective is ppo"),
        ({"refill": 1, "advantages": "reinforce_pp"}, "refill is 1, and advantages is reinforce_pp"),
        ({"overlong": "penalty"}, r"needs an overlong_buffer of 1 to max_new_tokens \(256\) tokens, not 0"),
        ({"overlong": "penalty", "overlong_buffer": 257}, "tokens, not 257"),
        ({"overlong": "drop", "overlong_buffer": 8}, "overlong_buffer is 8, and overlong is drop, not penalty"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(settings: dict[str, object], said: str) -> None:
    with pytest.raises(ValidationError, match=said):
        AlgorithmConfig.model_validate(settings)


def test_the_guides_advantages_are_advantages_and_its_settings_are_settings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    guide = (Path(__file__).parents[3] / "docs/guides/sampling.md").read_text()
    (tmp_path / "my_advantages.py").write_text(re.findall(r"```python\n(.*?)```", guide, re.DOTALL)[0])
    monkeypatch.setattr(sys, "path", [*sys.path])
    settings = [tomllib.loads(block) for block in re.findall(r"```toml\n(.*?)```", guide, re.DOTALL)]
    configs = [AlgorithmConfig(**each["algorithm"]) for each in settings if "algorithm" in each]
    own = NamedAdvantages(configs[-1], [tmp_path])
    assert own(scored([[0.0, 1.0, 0.5], [1.0, 1.0]])) == [[0.0, 1.0, 0.0], [0.0, 0.0]]
    table = guide.split("## Advantages")[1]
    assert set(re.findall(r"^\| `(\w+)`[^|]*\|", table, re.MULTILINE)) - {"advantages"} == set(BUILT_IN)
