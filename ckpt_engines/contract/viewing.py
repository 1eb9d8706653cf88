"""The optional protocol of engines that declare `Capabilities.views`: receivers read buckets in the sender's memory.

[sender]    ``post(lasting bucket, ...)``     once per bucket, as for other buckets; the receiver may also ``post`` it
[receiver]  ``view(version, index, ...)``     instead of ``post``: returns the bucket in the sender's memory
[receiver]  ``release(version)``              the receiver no longer reads any bucket of the version
[sender]    ``reclaim(version)``              waits until every receiver has released the version
"""

from __future__ import annotations

from abc import abstractmethod

import torch

from ..runtime.devices import HOST
from ..waits import Deadline
from .engine import WeightReceiver, WeightSender


class ViewableSender(WeightSender):
    """The sending half of an engine whose receivers can read its memory."""

    @abstractmethod
    def reclaim(self, version: int, deadline: Deadline) -> None:
        """Wait until no receiver reads a lasting bucket of `version` any more: its memory may then be overwritten.

        Raises `PeerLostError` when a receiver has disconnected without releasing the version, because it may still read it;
        `DeadlineExceededError`, after which the caller may try again; or `ClosedError`.
        """


class ViewingReceiver(WeightReceiver):
    """The receiving half of an engine that can read its senders' memory."""

    copied_to: torch.device = HOST
    """Device to which the framework copies viewed buckets, set before `connect`. A half that maps host memory may register the
    memory with that device, so that copies run at the full speed of the device's link."""

    @abstractmethod
    def view(self, version: int, index: int, nbytes: int, sender: str, deadline: Deadline) -> torch.Tensor:
        """Return the next bucket from `sender`, a lasting one, in the sender's memory: contiguous uint8 of `nbytes`, read-only.

        Buckets that adjoin in the sender's memory adjoin in one storage, which their tensors share. A tensor stays readable while
        it is referenced, also after `close`; its bytes may change once `release` was called. Raises as `flush`.
        """

    @abstractmethod
    def release(self, version: int, deadline: Deadline) -> None:
        """Tell the sender that this receiver no longer reads `version`. Does nothing when it viewed no bucket of the version.

        Raises `PeerLostError`, `DeadlineExceededError` or `ClosedError`.
        """
