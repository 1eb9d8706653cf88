"""Receiver groups: rollout ranks that need the same slices and are planned together. Checks of senders against receivers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from weightlane.ckpt_engines import ManifestError

from ..version.placement import Placement
from ..version.tensor_spec import TensorSpec, dtype_name
from .send_assignment import PART


@dataclass(frozen=True, slots=True)
class ReceiverGroup:
    """Rollout ranks that need the same slices."""

    placement: Placement
    receivers: tuple[str, ...]
    """In rank order."""


def group_receivers(needed: Mapping[str, Placement]) -> tuple[ReceiverGroup, ...]:
    """Group the rollout ranks with equal placements, in the order of each group's first rank.

    Placements are compared instead of hashed, because two different ones differ within the first few tensors. A placement object
    that many ranks share is compared once.
    """
    seen: dict[int, int] = {}
    by_names: dict[tuple[str, ...], list[int]] = {}
    groups: list[tuple[Placement, list[str]]] = []
    for receiver, placement in needed.items():
        index = seen.get(id(placement))
        if index is None:
            candidates = by_names.setdefault(tuple(spec.name for spec in placement.specs), [])
            index = next((each for each in candidates if groups[each][0] == placement), None)
            if index is None:
                index = len(groups)
                candidates.append(index)
                groups.append((placement, []))
            seen[id(placement)] = index
        groups[index][1].append(receiver)
    return tuple(ReceiverGroup(placement, tuple(receivers)) for placement, receivers in groups)


def replica_of(receiver: str) -> str:
    """The replica in the name of a rollout rank: ``"rollout-0/3"`` -> ``"rollout-0"``."""
    return receiver.rpartition("/")[0] or receiver


def missing_tensor(spec: TensorSpec, receiver: str) -> ManifestError:
    """The error for a tensor that a rollout rank needs and no trainer rank holds."""
    return ManifestError(
        f"{receiver} needs {spec.name} of shape {list(spec.shape)}, which no trainer rank holds.",
        part=PART,
        peer=receiver,
        hint="Trainer and rollout must name the tensors of the same model, as its Hugging Face checkpoint does.",
    )


def check_spec(sent: TensorSpec, sender: str, needed: TensorSpec, rank: str) -> None:
    """Raise `ManifestError` unless a tensor has the same shape on `sender` and on the rollout rank `rank`.

    `rank` may have any dtype that can represent every value of the dtype on the wire.
    """
    if sent.shape != needed.shape:
        padded = len(sent.shape) == len(needed.shape) > 0 and sent.shape[1:] == needed.shape[1:]
        if padded:
            rows = sent.shape[0] - needed.shape[0]
            hint = (
                f"{sender if rows > 0 else rank} has {abs(rows)} rows more: a padded vocabulary?"
                " Describe the checkpoint's tensor, without the padding."
            )
        else:
            hint = "Trainer and rollout must load the same model, and describe slices of its checkpoint's tensors."
        raise ManifestError(
            f"{sent.name} has shape {list(sent.shape)} on {sender} and {list(needed.shape)} on {rank}.",
            part=PART,
            peer=rank,
            hint=hint,
        )
    if sent.dtype != needed.dtype and not holds_every(needed.dtype, sent.dtype):
        raise ManifestError(
            f"{sent.name} is {dtype_name(sent.dtype)} on {sender} and {dtype_name(needed.dtype)} on {rank},"
            " a cast that loses bits.",
            part=PART,
            peer=rank,
            hint="sync.wire_dtype must be the rollout's dtype.",
        )


def holds_every(wide: torch.dtype, narrow: torch.dtype) -> bool:
    """Whether dtype `wide` can represent every value of dtype `narrow`."""
    if wide == narrow:
        return True
    if wide.is_floating_point and narrow.is_floating_point:
        outer, inner = torch.finfo(wide), torch.finfo(narrow)
        least = outer.tiny * outer.eps, inner.tiny * inner.eps  # the smallest subnormal numbers
        return outer.eps <= inner.eps and outer.max >= inner.max and least[0] <= least[1]
    if torch.bool in (wide, narrow) or wide.is_floating_point or narrow.is_floating_point:
        return False
    return torch.iinfo(wide).min <= torch.iinfo(narrow).min and torch.iinfo(wide).max >= torch.iinfo(narrow).max
