"""Advantages by their name in a configuration: a built-in one, or ``module:function``."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from weightlane.ckpt_engines import ProtocolError

from ..data.named_function import built_in_or_own
from .advantages import batch_advantages, group_advantages, leave_one_out_advantages
from .config import AlgorithmConfig

_PART = "advantages"


@dataclass(frozen=True, slots=True)
class ScoredGroup:
    """The completions of one prompt, as advantages are computed from them. There are two or more."""

    rewards: Sequence[float]
    """The reward of each completion, with the penalty for its length if ``algorithm.overlong`` is ``penalty``."""
    lengths: Sequence[int]
    """Generated tokens of each completion, the stop token included."""
    overlong: Sequence[bool]
    """Whether each completion was cut off at ``algorithm.max_new_tokens``."""
    task: Mapping[str, Any]
    """The line of the data, as a reward function gets it."""

    @property
    def differs(self) -> bool:
        """Whether the rewards differ. If they don't, advantages relative to the group are 0."""
        return max(self.rewards) != min(self.rewards)


class Advantages(Protocol):
    """A function that says how much better than expected each completion of a batch was."""

    def __call__(self, groups: Sequence[ScoredGroup]) -> Sequence[Sequence[float]]:
        """Return a finite number for every completion of every group, in their order.

        Args:
            groups: The groups of one batch, which may differ in size.
        """


def _of_groups(config: AlgorithmConfig) -> Advantages:
    return lambda groups: [
        group_advantages(_rewards(group)[None], normalize_std=config.normalize_std)[0].tolist() for group in groups
    ]


def _of_the_others(_: AlgorithmConfig) -> Advantages:
    return lambda groups: [leave_one_out_advantages(_rewards(group)[None])[0].tolist() for group in groups]


def _of_the_batch(*, centre_groups: bool) -> Callable[[AlgorithmConfig], Advantages]:
    def made(_: AlgorithmConfig) -> Advantages:
        return lambda groups: [
            each.tolist()
            for each in batch_advantages([_rewards(group) for group in groups], centre_groups=centre_groups)
        ]

    return made


BUILT_IN: dict[str, Callable[[AlgorithmConfig], Advantages]] = {
    "group": _of_groups,
    "reinforce_pp": _of_the_batch(centre_groups=False),
    "reinforce_pp_baseline": _of_the_batch(centre_groups=True),
    "rloo": _of_the_others,
}


class NamedAdvantages:
    """The function that ``[algorithm] advantages`` names; what it returns is checked.

    Args:
        config: The run's algorithm section.
        search_path: Folders in which the module of ``module:function`` is looked for before installed packages.

    Raises:
        ConfigError: There is no such function, or its module cannot be imported.
    """

    def __init__(self, config: AlgorithmConfig, search_path: Sequence[Path] = ()) -> None:
        self.name = config.advantages
        self._function: Advantages = built_in_or_own(
            self.name, BUILT_IN, config, search_path, part=_PART, setting="algorithm.advantages"
        )

    def __call__(self, groups: Sequence[ScoredGroup]) -> list[list[float]]:
        """See `Advantages`.

        Raises `ProtocolError`, naming the function, if it raises, or does not return a finite number for every completion.
        """
        try:
            found = [torch.as_tensor(each, dtype=torch.float32) for each in self._function(groups)]
        except Exception as cause:  # of a user's function
            raise ProtocolError(
                f"the advantages {self.name!r} failed: {type(cause).__name__}: {cause}",
                part=_PART,
                hint="The function gets a list of weightlane.trainer.ScoredGroup, and returns a list of numbers for each.",
            ) from cause
        if len(found) != len(groups):
            raise ProtocolError(
                f"the advantages {self.name!r} are of {len(found)} groups, and the batch has {len(groups)}.",
                part=_PART,
                hint="Return a list of numbers for each group.",
            )
        for index, (group, each) in enumerate(zip(groups, found, strict=True)):
            if each.shape != (len(group.rewards),) or not bool(torch.isfinite(each).all()):
                raise ProtocolError(
                    f"the advantages {self.name!r} of group {index} are {each.tolist()}, for the rewards {list(group.rewards)}.",
                    part=_PART,
                    hint="Return a number for each of its completions, which is finite in float32.",
                )
        return [each.tolist() for each in found]


def _rewards(group: ScoredGroup) -> torch.Tensor:
    return torch.tensor(list(group.rewards), dtype=torch.float64)
