"""One outcome for all tensor-parallel ranks of a replica.

Ranks must not disagree about a version: if one of them cannot put it into service, none may begin to. And only one rank may
raise: vLLM's multiprocess executor stops reading answers at the first failed rank, so that an answer still on its way would be
taken for that of the next call. When the last rank raises, every other answer has been read.
"""

from __future__ import annotations

import json
from typing import Any

import torch
import torch.distributed as dist

from weightlane.ckpt_engines import WeightlaneError, error_from_wire


class RankGroup:
    """The ranks of one replica, in the order in which vLLM reads their answers."""

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self._group = group if group is not None and group.size() > 1 else None

    @property
    def raises(self) -> bool:
        """Whether this rank is the one that reports a failure."""
        return self._group is None or self._group.rank() == self._group.size() - 1

    def first_error(self, error: WeightlaneError | None) -> WeightlaneError | None:
        """The error of the lowest failed rank, or None when every rank is well. All ranks call this together."""
        if self._group is None:
            return error
        answers = self.exchange(None if error is None else error.to_wire())
        return next((error_from_wire(answer) for answer in answers if answer is not None), None)

    def exchange(self, fact: Any) -> list[Any]:
        """What each rank knows, in their order; JSON data, None where a rank has nothing to say. All ranks call this together."""
        if self._group is None:
            return [fact]
        data = b"" if fact is None else json.dumps(fact).encode()
        sizes = self._gather(torch.tensor([len(data)]))
        longest = int(max(size.item() for size in sizes))
        if longest == 0:
            return [None for _ in sizes]
        texts = self._gather(torch.frombuffer(bytearray(data.ljust(longest)), dtype=torch.uint8))
        return [
            json.loads(bytes(text.numpy())) if size.item() else None for text, size in zip(texts, sizes, strict=True)
        ]

    def _gather(self, mine: torch.Tensor) -> list[torch.Tensor]:
        assert self._group is not None
        everyone = [torch.empty_like(mine) for _ in range(self._group.size())]
        dist.all_gather(everyone, mine, group=self._group)
        return everyone
