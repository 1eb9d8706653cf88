"""`RankGroup`: one outcome for all tensor-parallel ranks of a replica.

If one rank cannot put a version into service, no rank may begin to. And only one rank may raise: vLLM's multiprocess executor
stops reading answers at the first failed rank, and would take a later rank's answer for that of the next call. The last rank
raises, because every other answer has been read by then.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from weightlane.ckpt_engines import WeightlaneError, as_weightlane_error, error_from_wire
from weightlane.sync.torchrun.rank_exchange import gathered


class RankGroup:
    """The ranks of one replica, in the order in which vLLM reads their answers. All ranks make every call together."""

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self._group = group if group is not None and group.size() > 1 else None

    @property
    def raises(self) -> bool:
        """Whether this rank is the one that reports a failure."""
        return self._group is None or self._group.rank() == self._group.size() - 1

    def run(self, step: Callable[[], object], part: str) -> WeightlaneError | None:
        """Run `step`, this rank's share of the work, on every rank. Returns the error of the lowest failed rank, or None.

        `part` names this rank in an error that is not yet a `WeightlaneError`.
        """
        error: WeightlaneError | None = None
        try:
            step()
        except Exception as cause:  # noqa: BLE001 - the other ranks wait for this rank's outcome, whatever it is
            error = as_weightlane_error(cause, part)
        if self._group is None:
            return error
        answers = self.gather(None if error is None else error.to_wire())
        return next((error_from_wire(answer) for answer in answers if answer is not None), None)

    def gather(self, fact: Any) -> list[Any]:
        """The facts of all ranks, in their order: JSON data, or None for a rank that has none."""
        if self._group is None:
            return [fact]
        data = b"" if fact is None else json.dumps(fact).encode()
        return [json.loads(text) if text else None for text in gathered(data, torch.device("cpu"), self._group)]
