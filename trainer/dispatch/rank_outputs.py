"""`RankOutputs`: outputs that a rank sends to the caller of a role. `joined` puts those of all ranks in order."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from weightlane.ckpt_engines import ProtocolError

from ..engines.contract import SequenceOutputs


@dataclass(frozen=True, slots=True)
class RankOutputs:
    """Outputs of the sequences that one rank computed, as a few large tensors, which are sent faster than many small ones."""

    indices: Sequence[int]
    lengths: Sequence[int]
    """Tokens of each of these sequences."""
    packed: Mapping[str, torch.Tensor]
    """[tokens of all these sequences, ...] by name."""

    @classmethod
    def of(cls, found: Mapping[int, SequenceOutputs]) -> RankOutputs:
        """Pack the outputs of each sequence, given by its index in the batch."""
        names = list(next(iter(found.values()), {}))
        return cls(
            list(found),
            [len(outputs[names[0]]) if names else 0 for outputs in found.values()],
            {name: torch.cat([outputs[name] for outputs in found.values()]) for name in names},
        )

    def by_sequence(self) -> dict[int, dict[str, torch.Tensor]]:
        """The outputs of each sequence, as views."""
        split = {name: torch.split(values, list(self.lengths)) for name, values in self.packed.items()}
        return {index: {name: parts[at] for name, parts in split.items()} for at, index in enumerate(self.indices)}


def joined(answers: Sequence[RankOutputs], count: int) -> list[SequenceOutputs]:
    """The outputs of `count` sequences, in the order of the batch, from those of all ranks."""
    found: dict[int, SequenceOutputs] = {}
    for answer in answers:
        found |= answer.by_sequence()
    if missing := [index for index in range(count) if index not in found]:
        raise ProtocolError(
            f"no rank has the outputs of sequence {missing[0]}.",
            part="worker dispatch",
            hint="Its training engine lost them.",
        )
    return [found[index] for index in range(count)]
