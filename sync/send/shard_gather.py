"""`ShardGather`: brings the other trainer ranks' bytes to rank 0, over a process group that training never uses."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress

import torch

from weightlane.ckpt_engines import (
    ClosedError,
    ConfigError,
    Deadline,
    DeadlineExceededError,
    TransportError,
)
from weightlane.ckpt_engines.engines.torch_distributed.process_group import (
    BackendName,
    Group,
    abandon_gloo,
    abort_accelerator_group,
    open_process_group,
    translated,
)
from weightlane.ckpt_engines.runtime.devices import runtime_of
from weightlane.ckpt_engines.runtime.threads import start_call, start_thread
from weightlane.ckpt_engines.waits import result_of

from ..control.rendezvous import Rendezvous

_PART = "shard gather"
_HINT = "Check that every trainer rank and the coordinator are alive and can reach each other."

_BACKENDS: dict[str, BackendName] = {"cpu": "gloo", "cuda": "nccl", "npu": "hccl"}
"""torch.distributed backend for each device type."""


class ShardGather:
    """Sends the bytes of all other trainer ranks to rank 0, bucket by bucket in lockstep."""

    def __init__(self, group: Group | None, names: Sequence[str], rank: int, device: torch.device) -> None:
        self._group = group
        self._names = list(names)
        self._rank = rank
        self._packed = torch.empty(0, dtype=torch.uint8, device=device)
        self._moving = False
        """Whether a thread is in a call that waits for another rank."""

    @classmethod
    def connect(
        cls,
        rendezvous: Rendezvous,
        session: str,
        names: Sequence[str],
        rank: int,
        device: torch.device,
        deadline: Deadline,
    ) -> ShardGather:
        """Open the process group with the other ranks."""
        backend = _BACKENDS.get(device.type)
        if backend is None:
            raise ConfigError(
                f"trainer ranks cannot hand each other {device.type} memory.",
                part=_PART,
                hint=f"Choose a checkpoint engine for one of: {', '.join(_BACKENDS)}.",
            )
        host = rendezvous.local_host

        def open_group() -> Group:
            store = rendezvous.store(f"gather-group/{session}", leads=rank == 0, deadline=deadline)
            with runtime_of(device).current():
                return open_process_group(
                    backend, store, rank, len(names), deadline, host=host, device=device, names=names
                )

        # Requests to the store have no timeout, so this rank would wait forever for a frozen rank 0.
        group = result_of(start_call(open_group), deadline, "the group of all trainer ranks", _PART, _HINT)
        return cls(group, names, rank, device)

    def receive(self, rank: int, nbytes: int, deadline: Deadline) -> torch.Tensor:
        """[rank 0] Receive the next `nbytes` of another rank; they stay valid until the next call."""
        packed = self.room(nbytes)
        self._run("recv", packed, rank, deadline)
        return packed

    def give(self, packed: torch.Tensor, deadline: Deadline) -> None:
        """[other ranks] Send these bytes to rank 0."""
        self._run("send", packed, 0, deadline)

    def close(self) -> None:
        """Leave the group; a thread that waits in `receive` or `give` raises `ClosedError`. Idempotent."""
        group, self._group = self._group, None
        if group is None or not self._moving:
            return
        if self._packed.is_cpu:
            abandon_gloo(group)
        else:
            # From Python 3.12 on, an exiting program cannot start threads; its groups end with it.
            with suppress(RuntimeError):
                start_thread("weightlane-abort", abort_accelerator_group, group)

    def room(self, nbytes: int) -> torch.Tensor:
        """Memory for `nbytes` that are sent or received, overwritten by the next call."""
        if self._packed.numel() < nbytes:
            self._packed = torch.empty(nbytes, dtype=torch.uint8, device=self._packed.device)
        return self._packed[:nbytes]

    def _run(self, kind: str, data: torch.Tensor, rank: int, deadline: Deadline) -> None:
        peer = self._names[rank]
        self._moving = True  # set before `_group` is read: `close` clears `_group` first, and then checks `_moving`
        try:
            group = self._group
            if group is None:
                raise ClosedError("the gather was closed.", part=_PART)
            with translated(_PART, deadline, f"{peer}'s bytes of a bucket", peer):
                operation = group.send if kind == "send" else group.recv
                work = operation([data], rank, 0)
                work.wait(deadline.timedelta())
        except (TransportError, DeadlineExceededError) as error:
            if self._group is None:
                raise ClosedError(f"the gather was closed while it waited for {peer}.", part=_PART) from error
            raise
        finally:
            self._moving = False
