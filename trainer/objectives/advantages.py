"""Advantages: how much better than expected a completion was."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from weightlane.ckpt_engines import ProtocolError

_STD_FLOOR = 1e-6
_PART = "advantages"


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
    centred = _centred(rewards)
    if normalize_std:
        centred = centred / (centred.square().mean(dim=1, keepdim=True).sqrt() + _STD_FLOOR)
    return centred.float()


def leave_one_out_advantages(rewards: torch.Tensor) -> torch.Tensor:
    """Advantages of completions relative to the others of their group (RLOO, arXiv 2402.14740, section 2.2).

    ``A = reward - mean of the group's other rewards``, which is ``n / (n - 1) * (reward - mean)`` for n completions.

    Args:
        rewards: [groups, group_size], finite; group_size at least 2.

    Returns:
        float32 [groups, group_size].
    """
    size = rewards.shape[1]
    return (_centred(rewards) * (size / (size - 1))).float()


def batch_advantages(rewards: Sequence[torch.Tensor], *, centre_groups: bool) -> list[torch.Tensor]:
    """Advantages normalised over all completions of a batch (REINFORCE++, arXiv 2501.03262).

    ``A = (value - mean) / (std + 1e-6)``, with mean and population standard deviation over the batch. The value is the reward, or
    with `centre_groups` the reward minus its group's mean (REINFORCE++-baseline). Where all are equal, they become 0.

    Args:
        rewards: [group_size] of each group, finite; sizes may differ.
        centre_groups: whether to subtract the mean of a completion's group first.

    Returns:
        float32 [group_size] for each group.
    """
    values = [_centred(each[None])[0] if centre_groups else each.double() for each in rewards]
    every = torch.cat(values)
    # Groups that are centred have a mean of 0, which rounding must not move: equal rewards keep an advantage of 0.
    centred = every if centre_groups else _centred(every[None])[0]
    scaled = centred / (centred.square().mean().sqrt() + _STD_FLOOR)
    return list(torch.split(scaled.float(), [len(each) for each in rewards]))


def _centred(rewards: torch.Tensor) -> torch.Tensor:
    """Subtract the mean of each row: float64 [rows, columns]. Rows of equal numbers become zeros.

    The mean of equal numbers can differ from them in the last bit, and a division would amplify that.
    """
    rewards = rewards.double()
    equal = rewards.amax(dim=1, keepdim=True) == rewards.amin(dim=1, keepdim=True)
    return torch.where(equal, 0.0, rewards - rewards.mean(dim=1, keepdim=True))


def gae(
    rewards: torch.Tensor, values: torch.Tensor, *, gamma: float = 1.0, lam: float = 0.95, bootstrap: float = 0.0
) -> tuple[torch.Tensor, torch.Tensor]:
    """Generalised advantage estimation (arXiv 1506.02438, equation 16) over the targets of one sequence.

    ``A_t = sum over l of (gamma * lam)^l * (r_{t+l} + gamma * V_{t+l+1} - V_{t+l})``. Only positions with a target are steps:
    pass ``rewards[mask]`` and ``values[mask]``; positions without a target in between are then skipped.

    Args:
        rewards: float [T], the reward of each target; see `kl_penalised_rewards`.
        values: float [T], the critic's value before each target.
        gamma: Discount of a step, 0 to 1.
        lam: 0 to 1; 0 relies on the critic, 1 on the rewards.
        bootstrap: Value after the last target: 0 where the completion ended, the critic's where it was cut off.

    Returns:
        float32 [T] advantages, and float32 [T] returns ``A + V``, the targets of a critic's values. Both without gradient.

    Raises:
        ProtocolError: Shapes disagree, or gamma or lam is out of its range.
    """
    if rewards.ndim != 1 or rewards.shape != values.shape:
        raise ProtocolError(
            f"rewards have shape {list(rewards.shape)}, values {list(values.shape)}.",
            part=_PART,
            hint="Give one of each for every target of one sequence.",
        )
    if not 0.0 <= gamma <= 1.0 or not 0.0 <= lam <= 1.0:
        raise ProtocolError(f"gamma is {gamma} and lam {lam}; both are from 0 to 1.", part=_PART)
    advantages: list[float] = []
    advantage, following = 0.0, bootstrap
    for reward, value in zip(reversed(rewards.tolist()), reversed(values.tolist()), strict=True):
        advantage = reward + gamma * following - value + gamma * lam * advantage
        following = value
        advantages.append(advantage)
    found = torch.tensor(advantages[::-1], dtype=torch.float64, device=values.device)
    return found.float(), (found + values.detach()).float()


def whiten(values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Shift and scale advantages to mean 0 and standard deviation 1 over the targets of a full batch.

    ``(value - mean) / (std + 1e-6)`` with the population standard deviation. Where all are equal, they become 0.

    Args:
        values: float, of any shape.
        mask: bool of the same shape: where there is a target.

    Returns:
        float32 of the same shape, 0 outside `mask`.
    """
    counted = values.detach()[mask].double()
    if not len(counted) or bool(counted.amax() == counted.amin()):
        return torch.zeros_like(values, dtype=torch.float32, requires_grad=False)
    centred = counted - counted.mean()
    scaled = centred / (centred.square().mean().sqrt() + _STD_FLOOR)
    return torch.zeros_like(values, dtype=torch.float32, requires_grad=False).masked_scatter(mask, scaled.float())
