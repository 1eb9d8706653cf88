"""Checks that ranks that compute together were given the same inputs. Different ones would give wrong gradients, or hang."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence

from weightlane.ckpt_engines import ProtocolError

from .inputs import PART, ForwardInput


def digest(inputs: Sequence[ForwardInput], slot_of: Callable[[ForwardInput], str]) -> str:
    """Return a digest of tokens, targets, slots and wanted outputs of `inputs`."""
    found = hashlib.sha256()
    for each in inputs:
        wanted = (each.top_k, each.entropy, each.logits, each.hidden_states, each.temperature, slot_of(each))
        found.update(repr((*wanted, len(each.tokens), None if each.targets is None else each.targets.shape)).encode())
        for tensor in (each.tokens, each.targets):
            if tensor is not None:
                found.update(tensor.contiguous().numpy().tobytes())
    return found.hexdigest()


def refuse_different(told: Sequence[tuple[int, str]]) -> None:
    """Raise `ProtocolError` where ranks of one share have different digests.

    Args:
        told: For every rank, its data parallel share and the digest of its inputs.
    """
    first: dict[int, str] = {}
    if any(first.setdefault(share, inputs) != inputs for share, inputs in told):
        raise ProtocolError(
            "ranks that compute together were given different inputs.",
            part=PART,
            hint="Seed what draws and orders the inputs alike on all ranks; dp_rank_forward takes those of one rank.",
        )
