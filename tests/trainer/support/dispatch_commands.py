"""The command of `engine_worker` that is about roles: see `TeamRanks`."""

from __future__ import annotations

import pickle

from weightlane.ckpt_engines import as_weightlane_error
from weightlane.trainer.dispatch.rank_worker import RankWorker


class DispatchCommands:
    """A part of the worker: a `RankWorker`, which shares the process group of the worker's first engine."""

    _rank: int
    _world: int
    _rank_worker: RankWorker | None = None

    def rank_worker(self, method: str, args: bytes) -> bytes:
        """Call a method, of a new one after ``close``; returns what it returned or raised, pickled, as it travels over Ray."""
        if self._rank_worker is None:
            self._rank_worker = RankWorker(self._rank, self._world)
        try:
            answer = getattr(self._rank_worker, method)(*pickle.loads(args))
        except Exception as error:  # noqa: BLE001 - the caller gets it
            answer = as_weightlane_error(error, f"rank {self._rank}")
        if method == "close":
            self._rank_worker = None
        return pickle.dumps(answer)
