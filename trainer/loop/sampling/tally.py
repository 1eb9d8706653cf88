"""`SampleTally`: the groups that were drawn against those that were trained on, and the bias between them in words."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any


@dataclass(slots=True)
class SampleTally:
    """Counts of drawn groups whose turn for training has come, and rewards of their completions.

    A completion succeeds if its reward is above 0. Rewards are the reward function's, without a penalty for length.
    """

    groups_drawn: int = 0
    """Groups of two completions or more, those that others replaced included."""
    groups_without_signal: int = 0
    """Groups whose advantages relative to the group are 0: rewards are equal, or every completion is masked."""
    groups_all_right: int = 0
    """Groups without signal in which every completion succeeds."""
    groups_all_wrong: int = 0
    """Groups without signal in which no completion succeeds."""
    groups_refilled: int = 0
    """Groups without signal that a group of a further task replaced."""
    overlong_completions: int = 0
    """Completions that were cut off at ``algorithm.max_new_tokens``."""
    completions_drawn: int = 0
    """Judged completions, dropped ones included."""
    reward_drawn: float = 0.0
    """Sum of their rewards."""
    successes_drawn: int = 0
    """Completions among them that succeed."""

    def draw(self, rewards: Sequence[float], *, signal: bool, overlong: int = 0, refilled: bool = False) -> None:
        """Count a group whose turn has come; `rewards` are those of its completions."""
        self.groups_drawn += 1
        self.groups_without_signal += not signal
        self.groups_all_right += not signal and min(rewards) > 0
        self.groups_all_wrong += not signal and max(rewards) <= 0
        self.groups_refilled += refilled
        self.overlong_completions += overlong
        self.add_rewards(rewards)

    def add_rewards(self, rewards: Sequence[float]) -> None:
        """Count completions alone, which are left out of any group."""
        self.completions_drawn += len(rewards)
        self.reward_drawn += sum(rewards)
        self.successes_drawn += sum(reward > 0 for reward in rewards)

    @property
    def mean_reward(self) -> float:
        """Mean reward of the drawn completions; 0 if there is none."""
        return self.reward_drawn / self.completions_drawn if self.completions_drawn else 0.0

    def since(self, before: SampleTally) -> SampleTally:
        """Return what was counted since `before`, which `copy` returned."""
        return SampleTally(*(getattr(self, each.name) - getattr(before, each.name) for each in fields(self)))

    def copy(self) -> SampleTally:
        """Return these counts as they are now."""
        return SampleTally(*(getattr(self, each.name) for each in fields(self)))

    def to_plain(self) -> dict[str, Any]:
        """Return the counts, and the mean reward in the place of the sum, as JSON-representable data."""
        return {**asdict(self), "reward_drawn": self.mean_reward}


def described_samples(samples: Mapping[str, Any]) -> dict[str, str]:
    """Return what drawing and leaving out have done to a run, in sentences by subject.

    `samples` are those of ``summary.json``. Subjects about which there is nothing to say are left out.
    """
    found: dict[str, str] = {}
    drawn, trained = samples.get("drawn_tokens", 0.0), samples.get("trained_tokens", 0.0)
    if drawn:
        found["length of completions"] = (
            f"{trained:.1f} tokens trained, {drawn:.1f} drawn: bias {trained / drawn - 1:+.1%}"
        )
    groups, silent = samples.get("groups_drawn", 0), samples.get("groups_without_signal", 0)
    if silent:
        refilled = samples["groups_refilled"]
        found["groups without signal"] = (
            f"{silent} of {groups} drawn, {silent / groups:.1%} ({samples['groups_all_right']} all right,"
            f" {samples['groups_all_wrong']} all wrong): {refilled} replaced by other tasks"
        )
    if overlong := samples.get("overlong_completions", 0):
        share = overlong / samples["completions_drawn"]
        found["overlong completions"] = f"{overlong} of {samples['completions_drawn']} cut off, {share:.2%}"
    if groups:
        drawn, trained = samples["reward_drawn"], samples["reward_trained"]
        found["reward of completions"] = f"{trained:.3f} trained, {drawn:.3f} drawn: bias {trained - drawn:+.3f}"
    if (tasks := samples.get("success_of_tasks")) is not None:
        rate = samples["successes_drawn"] / max(1, samples["completions_drawn"])
        found["success rate"] = (
            f"{rate:.3f} of drawn completions, {tasks:.3f} of tasks by their latest groups: bias {rate - tasks:+.3f}"
        )
    return found
