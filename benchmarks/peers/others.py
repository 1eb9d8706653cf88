"""Libraries that are measured: NIXL, and Ray's object store, with tensors in host memory; and the list of all rows."""

from __future__ import annotations

import secrets
import tempfile
import time
import warnings
from typing import Any

import torch

from .halves import Half, Peer, as_bytes
from .plain import PLAIN
from .weightlane_peers import WEIGHTLANE


class _Agent(Half):
    """A NIXL agent with this half's tensors registered, one descriptor per tensor."""

    def register(self) -> Any:
        """Start the agent; returns the descriptors."""
        from nixl._api import nixl_agent, nixl_agent_config

        self._agent: Any = nixl_agent(f"agent-{self.rank}", nixl_agent_config(backends=["UCX"]))
        memory = [as_bytes(tensor) for tensor in self.tensors.values()]
        self._registered = self._agent.register_memory(memory)
        return self._agent.get_xfer_descs(memory)

    def close(self) -> None:
        if hasattr(self, "_registered"):
            self._agent.deregister_memory(self._registered)


class _Lends(_Agent):
    """Waits until everybody has read."""

    def prepare(self) -> None:
        descriptors = self.register()
        self.line.tell_receivers((self._agent.get_agent_metadata(), self._agent.get_serialized_descs(descriptors)))
        for metadata in self.line.from_receivers():
            self._agent.add_remote_agent(metadata)

    def exchange(self, round_number: int) -> None:  # noqa: ARG002 - the same every round
        self.line.signal_receivers()
        until = time.monotonic() + self.line.deadline_s
        missing = self.line.receivers
        while missing:
            missing -= sum(len(notes) for notes in self._agent.get_new_notifs().values())
            if time.monotonic() > until:
                raise TimeoutError(f"{missing} receivers have not read within {self.line.deadline_s:.0f} s")
            time.sleep(0.002)  # a sender that spins takes a core from the receivers


class _Reads(_Agent):
    """READs the sender's memory into its own tensors."""

    def prepare(self) -> None:
        metadata, descriptors = self.line.from_sender(self.receiver)
        mine = self.register()
        sender = self._agent.add_remote_agent(metadata)
        theirs = self._agent.deserialize_descs(descriptors)
        self.line.tell_sender(self.receiver, self._agent.get_agent_metadata())
        sender = sender.decode() if isinstance(sender, bytes) else sender
        self._read = self._agent.initialize_xfer("READ", mine, theirs, sender, b"read")

    def exchange(self, round_number: int) -> None:  # noqa: ARG002 - the same every round
        self.line.await_sender(self.receiver)
        until = time.monotonic() + self.line.deadline_s
        state = self._agent.transfer(self._read)
        while state != "DONE":
            if state == "ERR" or time.monotonic() > until:
                raise RuntimeError(f"the transfer is in state {state}")
            state = self._agent.check_xfer_state(self._read)


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


class _Puts(Half):
    """Starts Ray, and puts one dictionary of numpy views into its object store, which has room for three payloads."""

    def prepare(self) -> None:
        import ray

        self._folder = tempfile.TemporaryDirectory(prefix="ray", ignore_cleanup_errors=True)  # short, for its sockets
        ray.init(
            address="local",
            num_cpus=self.line.receivers + 1,
            object_store_memory=max(128 << 20, 3 * self.workload.nbytes),
            include_dashboard=False,
            log_to_driver=False,
            logging_level="error",
            namespace="peers",
            _temp_dir=self._folder.name,
        )
        self._holder = ray.remote(num_cpus=0)(_Holder).options(name="holder").remote()
        ray.get(self._holder.held.remote(), timeout=self.line.deadline_s)
        self.line.tell_receivers(ray.get_runtime_context().gcs_address)
        self.line.from_receivers()

    def exchange(self, round_number: int) -> None:  # noqa: ARG002 - the same every round
        import ray

        reference = ray.put({name: as_bytes(tensor).numpy() for name, tensor in self.tensors.items()})
        ray.get(self._holder.hold.remote([reference]), timeout=self.line.deadline_s)
        self.line.signal_receivers()

    def close(self) -> None:
        import ray

        ray.shutdown()
        if hasattr(self, "_folder"):
            self._folder.cleanup()


class _Gets(Half):
    """Gets it, mapped, and copies."""

    def prepare(self) -> None:
        import ray

        address = self.line.from_sender(self.receiver)
        ray.init(address=address, namespace="peers", log_to_driver=False, logging_level="error")
        self._holder = ray.get_actor("holder")
        self.line.tell_sender(self.receiver, "connected")

    def exchange(self, round_number: int) -> float:  # noqa: ARG002 - the same every round
        import ray

        self.line.await_sender(self.receiver)
        began = time.monotonic()
        (reference,) = ray.get(self._holder.held.remote(), timeout=self.line.deadline_s)
        arrays = ray.get(reference, timeout=self.line.deadline_s)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch says that the mapped arrays are read-only; they are only read
            for name, tensor in self.tensors.items():
                as_bytes(tensor).copy_(torch.from_numpy(arrays[name]))
        return began

    def close(self) -> None:
        import ray

        ray.shutdown()


_NIXL: dict[str, Any] = {
    "packages": ("nixl", "nixl-cu12"), "modules": ("nixl._api",), "install": "pip install --no-deps nixl nixl-cu12"
}  # fmt: skip
_RAY = {
    "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0", "RAY_USAGE_STATS_ENABLED": "0", "RAY_memory_monitor_refresh_ms": "0",
    "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32),
}  # fmt: skip
OTHERS = (
    Peer(
        "ray-object-store",
        "memory",
        "ray.put of one dictionary of numpy views; ray.get, copy out",
        _Puts,
        _Gets,
        packages=("ray",),
        modules=("ray",),
        install="pip install ray",
        environment=_RAY,
    ),
    Peer("nixl", "memory", "READ into the receivers' tensors, UCX picks the transport", _Lends, _Reads, **_NIXL),
    Peer("nixl-tcp", "network", "the same with UCX_TLS=tcp", _Lends, _Reads, environment={"UCX_TLS": "tcp"}, **_NIXL),
)
CATALOGUE = {peer.name: peer for peer in (*PLAIN, *WEIGHTLANE, *OTHERS)}
"""All rows by name, in the order of the table."""
