"""The most probable tokens, ties broken by the lower token, with the vocabulary in one place or split over ranks.

`torch.topk` promises no order among equal values. Each logit and its token are therefore packed into one integer, a key, larger
for a larger logit and, among equal ones, for a lower token. Keys of different tokens are never equal.
"""

from __future__ import annotations

import torch
import torch.distributed as dist

LOW = 0xFFFFFFFF
"""The lower half of a key holds this number minus the token."""
NONE = torch.iinfo(torch.int64).min
"""A key below those of all logits; pads the keys of a rank that has fewer tokens than are wanted."""


def best_keys(logits: torch.Tensor, count: int, first: int = 0) -> torch.Tensor:
    """Return int64 [rows, `count`], keys of the largest of `logits` (float32 [rows, tokens]), in descending order.

    `first` is the token of the first logit. Takes twice the memory of `logits`.
    """
    tokens = torch.arange(LOW - first, LOW - first - logits.shape[1], -1, device=logits.device)
    # Adding 0.0 turns -0.0 into 0.0, so that equal logits have equal bits.
    keys = (_mirrored((logits + 0.0).view(torch.int32)).long() << 32).add_(tokens)
    found = keys.topk(min(count, keys.shape[1])).values
    return torch.nn.functional.pad(found, (0, count - found.shape[1]), value=NONE)


def best_of_all(keys: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Return the best of all ranks' `keys` (int64 [rows, count]) on every rank of `group`, which call this together."""
    gathered = [torch.empty_like(keys) for _ in range(dist.get_world_size(group))]
    dist.all_gather(gathered, keys.contiguous(), group=group)
    return torch.cat(gathered, dim=1).topk(keys.shape[1]).values


def unpacked(keys: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the tokens (int64) and the logits (float32) of `keys`."""
    return LOW - (keys & LOW), _mirrored((keys >> 32).int()).view(torch.float32)


def _mirrored(bits: torch.Tensor) -> torch.Tensor:
    """Map the bits of floats (int32) to integers in the order of these floats, or such integers back to bits.

    Negative floats are stored as sign and magnitude; therefore all their bits but the sign are inverted.
    """
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)
