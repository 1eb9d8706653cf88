"""Process groups of torch.distributed in addition to its default one, and the TCP stores in which their members meet.

A trainer and a vLLM worker each have a default process group already, so weightlane makes its groups from the bare backend
classes over a store of their own. Nothing here changes torch's global state.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from typing import Any, Literal, Protocol, TypeVar, cast

import torch
import torch.distributed as dist

from ...channels.listener import listen_tcp
from ...errors import (
    ConfigError,
    DeadlineExceededError,
    EngineUnavailableError,
    PeerLostError,
    TransportError,
    WeightlaneError,
)
from ...runtime.environment import environment
from ...waits import Deadline, Lifecycle, run_bounded
from .gloo_connect import connect_gloo, member_names

BackendName = Literal["gloo", "nccl", "hccl"]
_T = TypeVar("_T")


class Group(Protocol):
    """The methods of torch.distributed's backend classes that weightlane uses."""

    def rank(self) -> int:
        """Rank of this process in the group."""

    def size(self) -> int:
        """Number of processes in the group."""

    def broadcast(self, tensors: list[torch.Tensor], options: dist.BroadcastOptions) -> dist.Work:
        """Start a broadcast."""

    def send(self, tensors: list[torch.Tensor], destination: int, tag: int, /) -> dist.Work:
        """Start to send to one rank."""

    def recv(self, tensors: list[torch.Tensor], source: int, tag: int, /) -> dist.Work:
        """Start to receive from one rank."""

    def _start_coalescing(self) -> None:
        """Begin a batch of sends and receives."""

    def _end_coalescing(self) -> dist.Work:
        """Start the batch."""

    def abort(self) -> None:
        """Break off pending operations; without effect in gloo, see `abandon_gloo`."""


_PART = "process group"
_NCCL_DETAIL = "Last error:"
"""NCCL's text above the line that states the cause, such as two ranks on one GPU."""
_GRACE_S = 0.05
"""How long `call_bounded` waits beyond the deadline: enough for a call that keeps the deadline to raise its own error."""
_NEVER = timedelta(days=1)
"""Timeout of NCCL's and HCCL's operations, whose deadlines the engine keeps."""
_NO_WATCHDOG: dict[str, dict[str, str]] = {
    # NCCL's and HCCL's own watchdogs kill the process on a timeout, on an error, and when a call into the driver takes
    # long; and a wait that blocks in C++ could not be interrupted. Deadlines are kept by the engine, which aborts the
    # communicator and raises. Only the constructor reads these variables; the training's groups keep the user's settings.
    "nccl": {
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
        "TORCH_NCCL_BLOCKING_WAIT": "0",
        "TORCH_NCCL_ENABLE_MONITORING": "0",
    },
    "hccl": {"HCCL_ASYNC_ERROR_HANDLING": "0", "HCCL_BLOCKING_WAIT": "0"},
}


def open_process_group(
    backend: BackendName,
    store: dist.Store,
    rank: int,
    world: int,
    deadline: Deadline,
    *,
    host: str = "127.0.0.1",
    device: torch.device | None = None,
    threads: int = 1,
    names: Sequence[str] = (),
    nccl: Mapping[str, int | str] | None = None,
) -> Group:
    """Open a group of `world` processes that meet in `store`; all of them must call this at the same time.

    `store` belongs to this group alone, e.g. a ``PrefixStore``. `deadline` bounds the forming of the group; operations have
    deadlines of their own. gloo listens on `host` and runs `threads` operations at a time, each of which occupies a thread while
    it waits for a peer. nccl and hccl need the `device`. `names` are those of the processes for errors, by rank; without, "rank
    1". `nccl` has fields of the communicator's ``ncclConfig_t`` by the names that torch gives them, e.g. ``net_name``.

    Raises:
        ConfigError: This torch does not know one of the `nccl` fields.
        DeadlineExceededError: A process did not join.
        PeerLostError: A process joined and died.
        EngineUnavailableError: This torch lacks the backend.
    """
    others = member_names([other for other in range(world) if other != rank], names)
    with translated(_PART, deadline, f"all {world} members of the group", others):
        if backend == "gloo":

            def connect(meeting_store: dist.Store, timeout: timedelta) -> Group:
                options = cast("Any", dist.ProcessGroupGloo)._Options()  # the only way to choose the address
                options._devices = [dist.ProcessGroupGloo.create_device(hostname=host)]
                options._timeout = timeout
                options._threads = threads
                return cast("Group", dist.ProcessGroupGloo(meeting_store, rank, world, options))

            return connect_gloo(store, rank, world, deadline, connect, names=names)
        if device is None:
            raise TransportError(f"{backend} needs a device.", part=_PART)
        if backend == "nccl":
            return _open_nccl(store, rank, world, device, nccl or {})
        return _open_hccl(store, rank, world)


def _open_nccl(
    store: dist.Store, rank: int, world: int, device: torch.device, settings: Mapping[str, int | str]
) -> Group:
    if not dist.is_nccl_available():
        raise EngineUnavailableError("this torch was built without NCCL.", part=_PART)
    options = dist.ProcessGroupNCCL.Options()
    options.config.blocking = nccl_blocking(torch.cuda.nccl.version())  # type: ignore[no-untyped-call]  # torch is untyped there
    for name, value in settings.items():
        if not hasattr(options.config, name):
            raise ConfigError(
                f"this torch cannot set NCCL's {name}.", part=_PART, hint=f"Leave out checkpoint_engine.options.{name}."
            )
        setattr(options.config, name, value)
    options._timeout = _NEVER
    with environment(_NO_WATCHDOG["nccl"]):
        group = dist.ProcessGroupNCCL(store, rank, world, options)
    group._set_sequence_number_for_group()  # torch does so for every group it makes
    group.eager_connect_single_device(device)
    return cast("Group", group)


def nccl_blocking(version: tuple[int, ...]) -> int:
    """Return ``ncclConfig_t.blocking`` for an NCCL version: 0, so that a communicator can be aborted while it connects.

    NCCL 2.26 gets 1, because it hangs at random with 0 (pytorch/pytorch#153960). A communicator that cannot be aborted is left
    to the thread that opens it, as described at `open_device_group`.
    """
    return 1 if version[:2] == (2, 26) else 0


def _open_hccl(store: dist.Store, rank: int, world: int) -> Group:
    try:
        c10d: Any = importlib.import_module("torch_npu._C._distributed_c10d")
    except ImportError as error:
        raise EngineUnavailableError(f"torch_npu cannot be imported: {error}.", part=_PART) from error
    options = c10d.ProcessGroupHCCL.Options()
    options._timeout = _NEVER
    with environment(_NO_WATCHDOG["hccl"]):
        group: Group = c10d.ProcessGroupHCCL(store, rank, world, options)
    return group


def start_broadcast(group: Group, data: torch.Tensor, root: int, deadline: Deadline | None) -> dist.Work:
    """Start to broadcast contiguous uint8 `data` from rank `root`; gloo fails the broadcast at the deadline."""
    options = dist.BroadcastOptions()
    options.rootRank = root
    options.rootTensor = 0
    if deadline is not None:
        options.timeout = deadline.timedelta()
    return group.broadcast([data], options)


def start_pairs(group: Group, pairs: Sequence[tuple[str, torch.Tensor, int]]) -> dist.Work:
    """Start sends and receives of an NCCL or HCCL group together, in its one communicator: none waits for another.

    Each pair is ``"isend"`` or ``"irecv"``, contiguous uint8, and the rank of the peer.
    """
    batch_isend_irecv = getattr(group, "batch_isend_irecv", None)  # torch_npu's own, which implements no coalescing
    if batch_isend_irecv is not None:
        kinds, tensors, ranks = zip(*pairs, strict=True)
        return cast("dist.Work", batch_isend_irecv(list(kinds), list(tensors), list(ranks)))
    # One by one they would go through communicators of two that torch opens by itself, unbounded by any deadline.
    group._start_coalescing()
    for kind, data, rank in pairs:
        (group.send if kind == "isend" else group.recv)([data], rank, 0)
    return group._end_coalescing()


def abort_accelerator_group(group: Group) -> None:
    """Abort the communicators of an NCCL or HCCL group. Blocks while the library blocks, perhaps for ever.

    torch waits for NCCL inside ``abort`` and takes the communicator's lock for it, which another thread holds while it
    waits for NCCL to connect. So no caller with a deadline may call this directly.
    """
    abort_hccl = getattr(group, "abort_hccl_comm", None)  # torch_npu implements no `Backend.abort`
    if abort_hccl is not None:
        abort_hccl("closed by weightlane")
    else:
        group.abort()


def abandon_gloo(group: Group) -> None:
    """Make every operation that is pending in a gloo group fail now.

    gloo has no abort, and its destructor waits for pending operations. But a receive that times out closes all
    connections of its group, so this starts such a receive.
    """
    neighbour = (group.rank() + 1) % group.size()
    with contextlib.suppress(RuntimeError):
        group.recv([torch.empty(1, dtype=torch.uint8)], neighbour, 2**31 - 1).wait(timedelta(milliseconds=1))


def keep_for_ever(group: Group) -> None:
    """Keep a gloo group from being destroyed, even when the program ends, because its destructor would wait without end.

    gloo loses an operation that begins at the moment when its connection breaks. Nothing makes that operation fail any more,
    so one thread and the operation's memory are lost with it.
    """
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))


def call_bounded(call: Callable[[], _T], life: Lifecycle, deadline: Deadline, waiting_for: str, peer: str) -> _T:
    """Run `call` as `run_bounded` does. For a call that keeps `deadline` by itself unless a peer is frozen.

    The call gets a moment longer than the deadline, so that its own error, which says more, is raised if there is one.
    """
    return run_bounded(call, life, Deadline.after(deadline.remaining_s + _GRACE_S), waiting_for, peer=peer)


@contextlib.contextmanager
def translated(part: str, deadline: Deadline, waiting_for: str, peer: str = "") -> Iterator[None]:
    """Turn the RuntimeErrors of torch.distributed into weightlane's errors."""
    try:
        yield
    except WeightlaneError:
        raise
    except RuntimeError as error:
        raise translate(error, part, deadline, waiting_for, peer) from error


def translate(
    error: RuntimeError, part: str, deadline: Deadline, waiting_for: str, peer: str = ""
) -> DeadlineExceededError | TransportError:
    """Return the weightlane error for a RuntimeError of torch.distributed, which is recognised only by its text."""
    text = str(error)
    lowered = text.lower()
    if any(
        sign in lowered for sign in ("timed out", "timeout after", "wait timeout", "socket timeout", "connect timeout")
    ):
        return deadline.error(waiting_for, part=part, peer=peer)
    reason = text.splitlines()[0].rpartition("] ")[2]
    if detail := text.partition(_NCCL_DETAIL)[2].strip():
        reason = detail.splitlines()[0]
    if isinstance(error, dist.DistNetworkError) or any(
        sign in lowered
        for sign in ("closed by peer", "reset by peer", "connection refused", "broken pipe", "remote process")
    ):
        return PeerLostError(
            f"the connection was lost: {reason}",
            part=part,
            peer=peer,
            hint="Look at the peers' own logs for the reason.",
        )
    return TransportError(f"torch.distributed failed: {reason}", part=part, peer=peer)


def host_store(host: str, port: int = 0) -> tuple[dist.TCPStore, int]:
    """Return a TCPStore that this process serves on `host` only, and its port; port 0 takes a free one.

    ``TCPStore`` itself would listen on every interface, so it gets a socket that is bound already. Raises
    `AddressInUseError` or `ConfigError`.
    """
    listener = listen_tcp(host, port)
    port = listener.getsockname()[1]
    try:
        store = dist.TCPStore(host, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.fileno())
    except BaseException:
        listener.close()
        raise
    listener.detach()  # the store owns the descriptor from here on
    return store, port


def reserve_port(host: str) -> socket.socket:
    """Return a bound socket that reserves a free port of `host`: a process that asks for any free port gets another one.

    The process that the port is meant for can listen there meanwhile, for example with `host_store`. Close the socket after that.
    Raises `ConfigError` when `host` is not an address of this machine.
    """
    reserved = None
    try:
        family = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0][0]
        reserved = socket.socket(family, socket.SOCK_STREAM)
        reserved.bind((host, 0))
    except OSError as error:
        if reserved is not None:
            reserved.close()
        raise ConfigError(
            f"cannot reserve a port of {host!r}: {error}.", part="listener", hint="Use an address of this machine."
        ) from error
    reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # after the bind, which must find the port unused
    return reserved


def join_store(
    host: str, port: int, deadline: Deadline, peer: str = "", life: Lifecycle | None = None
) -> dist.TCPStore:
    """Return a client of the store at `host`:`port`. Its timeout is the deadline's remaining time.

    Raises `PeerLostError` when no process listens there, `DeadlineExceededError` when the store does not answer in time, or
    `ClosedError` when `life` is closed meanwhile.
    """
    waiting = life or Lifecycle("store", lambda: None)

    def join() -> dist.TCPStore:
        try:  # TCPStore itself would retry a refused connection, and log every attempt
            socket.create_connection((host, port), timeout=max(0.001, deadline.remaining_s)).close()
        except TimeoutError:
            raise deadline.error(f"a connection to {host}:{port}", part=waiting.part, peer=peer) from None
        except OSError as error:
            hint = "Check that its owner is alive."
            message = f"cannot connect to {host}:{port}: {error}."
            raise PeerLostError(message, part=waiting.part, peer=peer, hint=hint) from error
        with translated(waiting.part, deadline, f"the store at {host}:{port}", peer):
            return dist.TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=deadline.timedelta())

    try:  # TCPStore's first request has no timeout, so a stopped server process would block the caller for ever
        return call_bounded(join, waiting, deadline, f"an answer of the store at {host}:{port}", peer)
    finally:
        if life is None:
            waiting.close()
