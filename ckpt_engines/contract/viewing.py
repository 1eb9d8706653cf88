"""What an engine adds that declares `Capabilities.views`: receivers look at buckets in the sender's memory.

[sender]    ``post(lasting bucket, ...)``     once per bucket, as ever; the receiver may also ``post`` it
[receiver]  ``view(version, index, ...)``     in place of ``post``: the bucket where it lies
[receiver]  ``release(version)``              it looks at none of the version's buckets any more
[sender]    ``reclaim(version)``              waits until that is true of every receiver
"""

from __future__ import annotations

from abc import abstractmethod

import torch

from ..deadline import Deadline
from ..runtime.devices import HOST
from .engine import WeightReceiver, WeightSender


class ViewableSender(WeightSender):
    """The sending half of an engine whose receivers can look at its memory."""

    @abstractmethod
    def reclaim(self, version: int, deadline: Deadline) -> None:
        """Wait until no receiver looks at a lasting bucket of `version` any more: its memory may be overwritten then.

        Raises `PeerLostError` when a receiver has gone without saying so, which may still look, `DeadlineExceededError`,
        or `ClosedError`.
        """


class ViewingReceiver(WeightReceiver):
    """The receiving half of an engine that can look at its senders' memory."""

    copied_to: torch.device = HOST
    """Where views are copied to by whoever looks at them, said before `connect`: a half that maps host memory may register it
    with that device, so that copies are as fast as its link."""

    @abstractmethod
    def view(self, version: int, index: int, nbytes: int, sender: str, deadline: Deadline) -> torch.Tensor:
        """The next bucket from `sender`, which is lasting, where it lies: contiguous uint8 of `nbytes`, only to be read.

        Buckets that adjoin in the sender's memory adjoin in the tensors' common storage. A tensor stays readable for as long
        as somebody holds it, also after `close`; what it shows may change once `release` was called. Raises as `flush`.
        """

    @abstractmethod
    def release(self, version: int, deadline: Deadline) -> None:
        """Nobody here looks at `version` any more: tell its sender. Does nothing for a version of which nothing was viewed.

        Raises `PeerLostError`, `DeadlineExceededError` or `ClosedError`.
        """
