"""Methods of a peer's sender (index 0) and receivers, beside those of `weightlane bench`: Ray, NIXL, gloo tensor by tensor."""

from __future__ import annotations

import base64
import importlib
import tempfile
import time
import warnings
from collections.abc import Sequence
from typing import Any

import torch

from weightlane.ckpt_engines import Deadline
from weightlane.ckpt_engines.engines.torch_distributed.process_group import start_broadcast
from weightlane.ckpt_engines.runtime.json_socket import JsonSocket
from weightlane.cli.bench.processes import worker
from weightlane.cli.bench.processes.worker import Span, _wait_until


class _Holder:
    """A Ray actor of the sender's, which tells receivers the reference of a round."""

    def __init__(self) -> None:
        self._references: list[Any] = []

    def hold(self, references: list[Any]) -> None:
        """Keep them; those of the round before are freed."""
        self._references = references

    def held(self) -> list[Any]:
        """The references."""
        return self._references


class PeerMethods(worker.WorkerMethods):
    """Public methods are called by name; arguments and results are JSON."""

    _agent: Any = None
    _holder: Any = None

    def missing(self, modules: Sequence[str]) -> str:
        """Reason why one of `modules` cannot be imported; empty if all can."""
        for module in modules:
            try:
                importlib.import_module(module)
            except Exception as error:  # noqa: BLE001 - a broken installation fails in its own ways; the reason is reported
                return f"{module} cannot be imported ({type(error).__name__}: {error})"
        return ""

    def broadcast_each(self, at: float, timeout_s: float) -> Span:
        """Broadcast every tensor, all started at once, in the group of `open_gloo`."""
        assert self._gloo is not None
        started, deadline = _wait_until(at), Deadline.after(timeout_s)
        for work in [start_broadcast(self._gloo._group, each, 0, deadline) for each in self._bytes().values()]:
            work.wait()
        return started, time.monotonic()

    # -- Ray: one dictionary of numpy views in its object store ---------------------------------------------------------

    def ray_start(self, processes: int) -> str:
        """[sender] Start Ray, whose store has room for three payloads. Returns its address."""
        import ray

        self._folder = tempfile.TemporaryDirectory(prefix="ray", ignore_cleanup_errors=True)  # short, for its sockets
        ray.init(
            address="local",
            num_cpus=processes,
            object_store_memory=max(128 << 20, 3 * self._payload.flat.numel()),
            include_dashboard=False,
            log_to_driver=False,
            logging_level="error",
            namespace="peers",
            _temp_dir=self._folder.name,
        )
        self._holder = ray.remote(num_cpus=0)(_Holder).options(name="holder").remote()
        ray.get(self._holder.held.remote())
        return str(ray.get_runtime_context().gcs_address)

    def ray_join(self, address: str) -> None:
        """[receiver] Connect to the sender's Ray."""
        import ray

        ray.init(address=address, namespace="peers", log_to_driver=False, logging_level="error")
        self._holder = ray.get_actor("holder")

    def ray_put(self) -> Span:
        """[sender] Put the tensors."""
        import ray

        began = time.monotonic()
        reference = ray.put({name: data.numpy() for name, data in self._bytes().items()})
        ray.get(self._holder.hold.remote([reference]))
        return began, time.monotonic()

    def ray_get(self, at: float) -> Span:
        """[receiver] Get them, mapped, and copy."""
        import ray

        began = _wait_until(at)
        (reference,) = ray.get(self._holder.held.remote())
        arrays = ray.get(reference)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch says that the mapped arrays are read-only; they are only read
            for name, data in self._bytes().items():
                data.copy_(torch.from_numpy(arrays[name]))
        return began, time.monotonic()

    def ray_stop(self) -> None:
        """Disconnect; the sender's Ray ends."""
        import ray

        ray.shutdown()
        if not self._index:
            self._folder.cleanup()

    # -- NIXL: an agent with this process's tensors registered, one descriptor per tensor -------------------------------

    def nixl_start(self) -> list[str]:
        """Start the agent. Returns its metadata and the descriptors of its tensors, in base64."""
        from nixl._api import nixl_agent, nixl_agent_config

        self._agent = nixl_agent(f"agent-{self._index}", nixl_agent_config(backends=["UCX"]))
        memory = list(self._bytes().values())
        self._registered = self._agent.register_memory(memory)
        self._mine = self._agent.get_xfer_descs(memory)
        described = self._agent.get_agent_metadata(), self._agent.get_serialized_descs(self._mine)
        return [base64.b64encode(each).decode() for each in described]

    def nixl_meet(self, others: Sequence[Sequence[str]]) -> None:
        """Get to know the receivers, or as a receiver the one sender, and how to read its tensors."""
        for metadata, descriptors in ([base64.b64decode(each) for each in other] for other in others):
            name = self._agent.add_remote_agent(metadata)
            if self._index:
                theirs = self._agent.deserialize_descs(descriptors)
                name = name.decode() if isinstance(name, bytes) else name
                self._read = self._agent.initialize_xfer("READ", self._mine, theirs, name, b"read")

    def nixl_exchange(self, at: float, receivers: int, timeout_s: float) -> Span:
        """READ the sender's memory into the own tensors; as the sender, wait until every receiver has."""
        began = _wait_until(at)
        until, state = at + timeout_s, self._agent.transfer(self._read) if self._index else ""
        while state != "DONE" if self._index else receivers:
            if state == "ERR" or time.monotonic() > until:
                raise RuntimeError(f"the transfer is in state {state or receivers}")
            if self._index:
                state = self._agent.check_xfer_state(self._read)
                continue
            receivers -= sum(len(notes) for notes in self._agent.get_new_notifs().values())
            time.sleep(0.002)  # a sender that spins takes a core from the receivers
        return began, time.monotonic()

    def nixl_stop(self) -> None:
        """Give the tensors back."""
        self._agent.deregister_memory(self._registered)

    def _bytes(self) -> dict[str, torch.Tensor]:
        """The tensors as uint8 [nbytes], in their own memory."""
        return {name: tensor.view(-1).view(torch.uint8) for name, tensor in self._payload.tensors.items()}


def serve(requests: JsonSocket, index: int, shared: int) -> None:
    """See `weightlane.cli.bench.processes.worker.serve`."""
    worker.serve(requests, index, shared, PeerMethods)
