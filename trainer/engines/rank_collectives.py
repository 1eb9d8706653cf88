"""Join the trainer ranks, run collectives over them, some with gradients, and give torch.distributed's failures types."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _set_pg_timeout

from weightlane.ckpt_engines import (
    ClosedError,
    Deadline,
    DeadlineExceededError,
    PeerLostError,
    TransportError,
    WeightlaneError,
    as_weightlane_error,
    error_from_wire,
)
from weightlane.ckpt_engines.engines.torch_distributed.gloo_connect import connect_gloo
from weightlane.ckpt_engines.engines.torch_distributed.interfaces import interface_towards
from weightlane.ckpt_engines.engines.torch_distributed.process_group import host_store, join_store, translate

# torch 2.13 renamed both; those of old warn there.
_ALL_GATHER: Callable[..., Any] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_REDUCE_SCATTER: Callable[..., Any] = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
_ONE_AT_A_TIME = threading.Lock()
_RETRY_S = 0.05
_PEER = "another trainer rank"
_LIVING_ON = {
    # At a timeout or an error the watchdog aborts the group's communicators, so that kernels which wait for a peer end, and
    # lets the process live (torch's ErrorHandlingMode CleanUpOnly).
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "2",
    # Otherwise a monitor ends the process eight minutes after any rank's timeout, also on the ranks that noticed nothing.
    "TORCH_NCCL_ENABLE_MONITORING": "0",
    # The watchdog waits four times this before it aborts, for the flight recorder: by default a minute.
    "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "500",
}
"""Read by ``ProcessGroupNCCL`` when it is made, which engines do at several places (meshes, Megatron's groups).

A group that the program made before keeps torch's behaviour: its watchdog ends the process."""
_HINT = "Check that the other trainer ranks are alive, or raise trainer.collective_timeout_s."


def join_ranks(rank: int, world: int, rendezvous: tuple[str, int], device: torch.device, timeout_s: float) -> bool:
    """Initialise torch.distributed's default group unless it is initialised already: gloo, and NCCL as well for CUDA.

    Rank 0 serves the store at `rendezvous`, bound to that host only. Joining and every later collective have `timeout_s` seconds.

    Returns:
        Whether this call made the group, so that the caller has to destroy it.

    Raises `AddressInUseError` when the port is taken, `DeadlineExceededError` or `PeerLostError` when ranks do not join.
    """
    # The process has one default group, and engines may be in several of its threads.
    if not _ONE_AT_A_TIME.acquire(timeout=timeout_s):
        raise DeadlineExceededError(
            f"another thread of this process did not join its ranks within {timeout_s:g} s.",
            part=f"trainer rank {rank}",
            hint=_HINT,
        )
    try:
        return _join(rank, world, rendezvous, device, timeout_s)
    finally:
        _ONE_AT_A_TIME.release()


def _join(rank: int, world: int, rendezvous: tuple[str, int], device: torch.device, timeout_s: float) -> bool:
    part = f"trainer rank {rank}"
    if dist.is_initialized():
        if (dist.get_rank(), dist.get_world_size()) != (rank, world):
            raise TransportError(
                f"torch.distributed is initialised as rank {dist.get_rank()} of {dist.get_world_size()}, not {rank} of"
                f" {world}.",
                part=part,
            )
        return False
    host, port = rendezvous
    use_interface_towards(host)
    deadline = Deadline.after(timeout_s)
    with typed_collective_errors("the trainer ranks to join", part, timeout_s):
        store = host_store(host, port)[0] if rank == 0 else _await_store(host, port, deadline)
        store.set_timeout(deadline.timedelta())
        backend = group_backend(device)

        def connect(place: dist.Store, timeout: timedelta) -> None:
            dist.init_process_group(backend, store=place, rank=rank, world_size=world, timeout=timeout)

        connect_gloo(store, rank, world, deadline, connect, undo=_forget_group, hint=_HINT)
        _set_pg_timeout(timedelta(seconds=timeout_s))
    return True


def group_backend(device: torch.device) -> str:
    """Return torch's name of the backends of a group of ranks on `device`. NCCL's groups then leave the process alive."""
    if device.type != "cuda":
        return "gloo"
    for name, value in _LIVING_ON.items():
        os.environ.setdefault(name, value)
    return "cpu:gloo,cuda:nccl"


def _forget_group() -> None:
    """Reset torch's numbering of groups. It counts failed tries too, and all ranks must have the same count."""
    if not dist.is_initialized():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    dist.destroy_process_group()


@contextmanager
def typed_collective_errors(waiting_for: str, part: str, timeout_s: float) -> Iterator[None]:
    """Turn errors of torch.distributed into `DeadlineExceededError`, `PeerLostError` or `TransportError`.

    Other errors pass unchanged, such as those of the model's own computation. A block that ends although NCCL has failed
    meanwhile raises, too: its results are not whole.
    """
    try:
        yield
    except Exception as cause:
        # First, or what was made of torn data would be blamed.
        _raise_if_nccl_failed(waiting_for, part, timeout_s, cause)
        text = str(cause).lower()
        of_torch = isinstance(cause, dist.DistError) or "gloo" in text or "nccl" in text
        if isinstance(cause, WeightlaneError) or not isinstance(cause, RuntimeError) or not of_torch:
            raise
        error = translate(cause, part, Deadline.after(timeout_s), waiting_for, peer=_PEER)
        if isinstance(error, DeadlineExceededError):
            raise _late(waiting_for, part, timeout_s) from cause
        raise error from cause
    else:
        _raise_if_nccl_failed(waiting_for, part, timeout_s)


def _raise_if_nccl_failed(waiting_for: str, part: str, timeout_s: float, cause: Exception | None = None) -> None:
    failure = _found_by_watchdog()
    if failure == "TIMEOUT":
        raise _late(waiting_for, part, timeout_s) from cause
    if failure:
        raise PeerLostError(
            f"NCCL failed while waiting for {waiting_for} ({failure}).", part=part, peer=_PEER, hint=_HINT
        ) from cause


def _found_by_watchdog() -> str:
    """Return how a collective of this process's groups has failed, by torch's name (``TIMEOUT``, ``COMM_ERROR``), or "".

    Once the communicators of a group were aborted, its collectives leave their outputs half written, and raise nothing: whatever
    was computed since is not to be used.
    """
    cuda = torch.device("cuda")
    for group in _nccl_groups():
        # A group of gloo alone says that it serves CUDA, too.
        error = getattr(group._get_backend(cuda), "get_error", None) if cuda in group._device_types else None
        if error is not None and (name := str(error().name)) != "SUCCESS":
            return name
    return ""


def _nccl_groups() -> list[Any]:
    return list(dist.distributed_c10d._world.pg_map) if dist.is_nccl_available() else []


def _late(waiting_for: str, part: str, timeout_s: float) -> DeadlineExceededError:
    return DeadlineExceededError(
        f"no answer within {timeout_s:g} s while waiting for {waiting_for}.", part=part, peer=_PEER, hint=_HINT
    )


def share_json(value: Any, device: torch.device) -> list[Any]:
    """Gather one value from every rank, in rank order. Collective; values are plain data."""
    mine = torch.tensor(list(json.dumps(value).encode()), dtype=torch.uint8, device=device)
    sizes = [torch.zeros(1, dtype=torch.int64, device=device) for _ in range(dist.get_world_size())]
    dist.all_gather(sizes, torch.tensor([len(mine)], device=device))
    longest = max(int(size.item()) for size in sizes)
    padded = torch.cat([mine, mine.new_zeros(longest - len(mine))])
    all_padded = [torch.empty_like(padded) for _ in sizes]
    dist.all_gather(all_padded, padded)
    return [
        json.loads(bytes(data[: int(size.item())].cpu().numpy())) for data, size in zip(all_padded, sizes, strict=True)
    ]


def on_every_rank(action: Callable[[], object], device: torch.device, part: str) -> None:
    """Run `action` on every rank; if it fails on any, every rank raises an error: its own, or else the first. Collective."""
    failure: WeightlaneError | None = None
    try:
        action()
    except Exception as error:  # noqa: BLE001 - it must reach the other ranks, which wait for it
        failure = as_weightlane_error(error, part)
    told = [wire for wire in share_json(failure.to_wire() if failure else None, device) if wire]
    if failure or told:
        raise failure or error_from_wire(told[0])


def on_rank_zero(action: Callable[[], object], rank: int, device: torch.device, part: str) -> None:
    """Run `action` on rank 0 while the others wait; if it fails, every rank raises its error. Collective."""
    on_every_rank(action if rank == 0 else lambda: None, device, part)


def leave_ranks() -> None:
    """Destroy the default group. Never raises: a peer that is already gone makes torch complain."""
    try:
        dist.destroy_process_group()
    except (RuntimeError, ValueError, AssertionError):
        return


def require_open(is_open: bool, part: str) -> None:
    """Raise `ClosedError` unless the engine was set up and not closed."""
    if not is_open:
        raise ClosedError("the training engine is not set up, or was closed.", part=part, hint="Call setup first.")


def use_interface_towards(host: str) -> None:
    """Make gloo listen on the interface through which this machine reaches `host`, the machine of the ranks' store.

    By default it advertises the address of the machine's host name, which other machines, or even this one, may not reach.
    ``GLOO_SOCKET_IFNAME`` in the environment takes precedence.
    """
    if interface := interface_towards(host):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)


def _await_store(host: str, port: int, deadline: Deadline) -> dist.Store:
    """Join the store of rank 0, which may not be served yet."""
    while True:
        try:
            return join_store(host, port, deadline, peer="trainer rank 0")
        except PeerLostError:
            if deadline.remaining_s <= _RETRY_S:
                raise
            time.sleep(_RETRY_S)


def copied(tensor: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Return `tensor`, which is equal on every rank of `group`; its gradient is the sum over the ranks."""
    copy: torch.Tensor = _Copied.apply(tensor, group)  # type: ignore[no-untyped-call]  # torch leaves it untyped
    return copy


def summed(tensor: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Return the sum of `tensor` over `group`; each rank's gradient is that of the sum."""
    total: torch.Tensor = _Summed.apply(tensor, group)  # type: ignore[no-untyped-call]  # torch leaves it untyped
    return total


def gathered(tensor: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
    """Return `tensor`, of the same shape on every rank of `group`, behind those of the ranks before it, and before the others'.

    Its gradient is the sum over the ranks, which is computed in float32 if that is wider.
    """
    whole: torch.Tensor = _Gathered.apply(tensor, group)  # type: ignore[no-untyped-call]  # torch leaves it untyped
    return whole


@dataclass(frozen=True, slots=True)
class ContextRanks:
    """The ranks that share the tokens of each micro-batch."""

    group: dist.ProcessGroup
    index: int
    """This rank's number among them."""
    count: int

    def joined(self, values: torch.Tensor, places: torch.Tensor, length: int) -> torch.Tensor:
        """Return the [length, ...] of which every rank has some rows: this one `values`, at `places`. Collective.

        Each rank is to compute the same from all rows; the gradient by its own `values` is then complete.
        """
        rows = values.new_zeros(length, *values.shape[1:]).index_copy(0, places, values)
        return summed(rows, self.group)


class _Copied(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        total = grads[0].contiguous().clone()
        dist.all_reduce(total, group=ctx.group)
        return total, None


class _Summed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        del ctx
        total = tensor.contiguous().clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        del ctx
        return grads[0], None


class _Gathered(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.group = group
        whole = tensor.new_empty(dist.get_world_size(group) * len(tensor), *tensor.shape[1:])
        _ALL_GATHER(whole, tensor.contiguous(), group=group)
        return whole

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, None]:
        given = grads[0]
        each = given.contiguous().to(torch.promote_types(given.dtype, torch.float32))
        mine = each.new_empty(len(each) // dist.get_world_size(ctx.group), *each.shape[1:])
        _REDUCE_SCATTER(mine, each, group=ctx.group)
        return mine.to(given.dtype), None
