"""What rollout ranks need: those that need the same are planned for together, and disagreements found before the first byte."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import torch

from weightlane.ckpt_engines import ManifestError

from ..version.placement import Placement
from ..version.tensor_spec import TensorSpec, dtype_name
from .send_assignment import PART, some


@dataclass(frozen=True, slots=True)
class ReceiverGroup:
    """Rollout ranks that need the same slices."""

    placement: Placement
    receivers: tuple[str, ...]
    """In rank order."""


def group_receivers(needed: Mapping[str, Placement]) -> tuple[ReceiverGroup, ...]:
    """Put together who needs the same, in the order of each group's first rank.

    Placements are compared, not hashed: one that differs does so after a few tensors, and one object that serves many ranks is
    looked at once.
    """
    seen: dict[int, int] = {}
    alike: dict[tuple[str, ...], list[int]] = {}
    found: list[tuple[Placement, list[str]]] = []
    for receiver, placement in needed.items():
        number = seen.get(id(placement))
        if number is None:
            candidates = alike.setdefault(tuple(spec.name for spec in placement.specs), [])
            number = next((each for each in candidates if found[each][0] == placement), None)
            if number is None:
                number = len(found)
                candidates.append(number)
                found.append((placement, []))
            seen[id(placement)] = number
        found[number][1].append(receiver)
    return tuple(ReceiverGroup(placement, tuple(receivers)) for placement, receivers in found)


def replica_of(receiver: str) -> str:
    """The replica that a rollout rank belongs to, by its name: ``"rollout-0/3"`` -> ``"rollout-0"``."""
    return receiver.rpartition("/")[0] or receiver


def check_replicas(
    groups: Sequence[ReceiverGroup],
    sent: Mapping[str, str],
    replicas: Mapping[str, str] | None,
    unused: Collection[str],
) -> None:
    """Raise `ManifestError` where a replica needs nothing of a tensor.

    Args:
        groups: All rollout ranks.
        sent: The names of all tensors, with a rank that sends them.
        replicas: The replica of each rank; None to tell it by the names.
        unused: Tensors that a replica may do without.
    """
    members: dict[str, dict[int, str]] = {}
    for number, group in enumerate(groups):
        for receiver in group.receivers:
            replica = replica_of(receiver) if replicas is None else replicas.get(receiver, receiver)
            members.setdefault(replica, {})[number] = receiver
    complete: set[frozenset[int]] = set()
    for replica, ranks in members.items():
        if frozenset(ranks) in complete:
            continue
        known = {spec.name for number in ranks for spec in groups[number].placement.specs}
        left = [name for name in sent if name not in known and name not in unused]
        if left:
            raise ManifestError(
                f"no rank of {replica} ({some(list(ranks.values()))}) needs {some(left)}, which {sent[left[0]]} sends.",
                part=PART,
                peer=next(iter(ranks.values())),
                hint="Trainer and rollout must load the same model; what a replica can do without must be allowed by name.",
            )
        complete.add(frozenset(ranks))


def missing_tensor(spec: TensorSpec, receiver: str) -> ManifestError:
    """For a tensor that a rollout rank needs and no trainer rank has."""
    return ManifestError(
        f"{receiver} needs {spec.name} of shape {list(spec.shape)}, which no trainer rank holds.",
        part=PART,
        peer=receiver,
        hint="Trainer and rollout must name the tensors of the same model, as its Hugging Face checkpoint does.",
    )


def check_spec(sent: TensorSpec, sender: str, other: TensorSpec, rank: str, *, exact: bool) -> None:
    """Raise `ManifestError` unless `rank` can take what `sender` sends.

    Args:
        sent: A tensor as `sender` names it.
        sender: A rank that sends it.
        other: The same as `rank` names it.
        rank: A rank that needs it, or that sends it too.
        exact: Whether the dtypes must be equal; else `rank` may have any that holds every value that is sent.
    """
    if sent.shape != other.shape:
        padded = len(sent.shape) == len(other.shape) > 0 and sent.shape[1:] == other.shape[1:]
        if padded:
            more, rows = (
                (sender, sent.shape[0] - other.shape[0])
                if sent.shape[0] > other.shape[0]
                else (
                    rank,
                    other.shape[0] - sent.shape[0],
                )
            )
            hint = f"{more} has {rows} rows more: a padded vocabulary? Describe the checkpoint's tensor, without the padding."
        else:
            hint = "Trainer and rollout must load the same model, and describe slices of its checkpoint's tensors."
        raise ManifestError(
            f"{sent.name} has shape {list(sent.shape)} on {sender} and {list(other.shape)} on {rank}.",
            part=PART,
            peer=rank,
            hint=hint,
        )
    if sent.dtype != other.dtype and (exact or not holds_every(other.dtype, sent.dtype)):
        raise ManifestError(
            f"{sent.name} is {dtype_name(sent.dtype)} on {sender} and {dtype_name(other.dtype)} on {rank}"
            f"{'' if exact else ', a cast that loses bits'}.",
            part=PART,
            peer=rank,
            hint="sync.wire_dtype must be the rollout's dtype.",
        )


def holds_every(wide: torch.dtype, narrow: torch.dtype) -> bool:
    """Whether every value of dtype `narrow` is one of dtype `wide`."""
    if wide == narrow:
        return True
    if wide.is_floating_point and narrow.is_floating_point:
        outer, inner = torch.finfo(wide), torch.finfo(narrow)
        least = outer.tiny * outer.eps, inner.tiny * inner.eps  # with subnormal numbers
        return outer.eps <= inner.eps and outer.max >= inner.max and least[0] <= least[1]
    if torch.bool in (wide, narrow) or wide.is_floating_point or narrow.is_floating_point:
        return False
    return torch.iinfo(wide).min <= torch.iinfo(narrow).min and torch.iinfo(wide).max >= torch.iinfo(narrow).max
