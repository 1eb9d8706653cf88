"""Advantages: how much better than expected a completion was."""

from __future__ import annotations

import torch

_STD_FLOOR = 1e-6


def group_advantages(rewards: torch.Tensor, *, normalize_std: bool = True) -> torch.Tensor:
    """Advantages of completions relative to their group (GRPO, arXiv 2402.03300, section 4.1.2).

    ``A = (reward - mean) / (std + 1e-6)`` within a group, with the population standard deviation; without `normalize_std`
    the division is left out (Dr. GRPO, arXiv 2503.20783). A group whose rewards are all equal gets zeros.

    Args:
        rewards: [groups, group_size], finite.
        normalize_std: whether to divide by the group's standard deviation.

    Returns:
        float32 [groups, group_size].
    """
    rewards = rewards.double()
    centred = rewards - rewards.mean(dim=1, keepdim=True)
    # The mean of equal numbers can differ from them in the last bit, which the division would blow up.
    centred = torch.where(rewards.amax(dim=1, keepdim=True) == rewards.amin(dim=1, keepdim=True), 0.0, centred)
    if normalize_std:
        centred = centred / (centred.square().mean(dim=1, keepdim=True).sqrt() + _STD_FLOOR)
    return centred.float()
