"""Ray: its object store, and Ray Direct Transport (RDT) over gloo and NIXL.

Sender and receivers are actors, one process each; the process that opens the peer is their driver and has a cluster to itself.
"""

from __future__ import annotations

import tempfile
import time
import warnings
from abc import abstractmethod
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from .peer import Needs, Peer, Session, Task, Through, Times
from .workload import State, Workload, as_bytes, copy_all

_ROOT = str(Path(__file__).resolve().parents[2])


class _Node:
    """Body of every actor, sender or receiver: owns the actor's tensors and moves them in or out."""

    def __init__(self, workload: Workload, rank: int) -> None:
        torch.set_num_threads(1)
        self.state = State(workload, 1000 + rank)
        self.began = 0.0

    def change(self, round_number: int) -> int:
        self.state.change(round_number)
        return self.state.digest()

    def digest(self) -> int:
        return self.state.digest()

    def put_arrays(self, per_tensor: bool) -> tuple[float, float, list[Any]]:
        """Into the object store: one dictionary of numpy views, or an object per tensor."""
        import ray

        began = time.monotonic()
        arrays = {name: as_bytes(tensor).numpy() for name, tensor in self.state.tensors.items()}
        references = [ray.put(array) for array in arrays.values()] if per_tensor else [ray.put(arrays)]
        return began, time.monotonic(), references

    def get_arrays(self, references: list[Any]) -> tuple[float, float]:
        """Out of the object store, which maps the objects, into this actor's tensors."""
        import ray

        began = time.monotonic()
        objects = ray.get(references)
        arrays = objects[0].values() if isinstance(objects[0], dict) else objects
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch says that the mapped arrays are read-only; they are only read
            for tensor, array in zip(self.state.tensors.values(), arrays, strict=True):
                as_bytes(tensor).copy_(torch.from_numpy(array))
        return began, time.monotonic()

    def lend(self) -> dict[str, torch.Tensor]:
        """RDT over a collective: the tensors, which Ray sends when somebody asks for them."""
        self.began = time.monotonic()
        return self.state.tensors

    def began_at(self) -> float:
        return self.began

    def take(self, tensors: dict[str, torch.Tensor]) -> float:
        """RDT over a collective: what Ray received for this actor."""
        copy_all(self.state.tensors, tensors)
        return time.monotonic()

    def put_nixl(self) -> tuple[float, float, list[Any]]:
        """RDT over NIXL: registers the tensors, moves nothing."""
        import ray

        began = time.monotonic()
        reference = ray.put(self.state.tensors, _tensor_transport="nixl")
        return began, time.monotonic(), [reference]

    def get_nixl(self, references: list[Any]) -> tuple[float, float]:
        """RDT over NIXL: read straight into this actor's tensors."""
        import ray
        from ray.experimental import set_target_for_ref

        began = time.monotonic()
        set_target_for_ref(references[0], list(self.state.tensors.values()))
        received = ray.get(references[0])
        for name, tensor in self.state.tensors.items():
            if tensor.data_ptr() != received[name].data_ptr():
                tensor.copy_(received[name])
        return began, time.monotonic()


class _RaySession(Session):
    def __init__(self, task: Task, actor: Any) -> None:
        self.deadline_s = task.deadline_s
        self.sender = actor.remote(task.workload, 0)
        self.receivers = [actor.remote(task.workload, rank + 1) for rank in range(task.receivers)]
        self._digest = 0

    def change(self, round_number: int) -> None:
        self._digest = self.get(self.sender.change.remote(round_number))

    def verify(self, round_number: int) -> bool:  # noqa: ARG002 - the same every round
        return all(digest == self._digest for digest in self.get([each.digest.remote() for each in self.receivers]))

    def get(self, references: Any) -> Any:
        """The values of `references`, by the deadline."""
        import ray

        return ray.get(references, timeout=self.deadline_s)


class _Pulls(_RaySession):
    """The sender puts, then the receivers get; both are actor calls that say when they began and ended."""

    def __init__(self, task: Task, actor: Any, put: str, arguments: tuple[Any, ...], get: str) -> None:
        super().__init__(task, actor)
        self._put, self._arguments, self._get = put, arguments, get

    def exchange(self, round_number: int) -> Times:  # noqa: ARG002 - the same every round
        began, put, references = self.get(getattr(self.sender, self._put).remote(*self._arguments))
        took = self.get([getattr(each, self._get).remote(references) for each in self.receivers])
        del references  # frees the objects before the next round
        done = max(ended for _, ended in took)
        return Times(
            # What NIXL lends is read out of the sender's own memory, so it may not change before all have read.
            trainer_blocked_s=(done if self._put == "put_nixl" else put) - began,
            rollout_blocked_s=max(ended - from_ for from_, ended in took),
            latency_s=done - began,
        )


class _Lends(_RaySession):
    """RDT over a collective group of the actors."""

    def exchange(self, round_number: int) -> Times:  # noqa: ARG002 - the same every round
        reference = self.sender.lend.remote()
        ended = self.get([each.take.remote(reference) for each in self.receivers])
        freed = time.monotonic()
        began = self.get(self.sender.began_at.remote())
        del reference
        return Times(freed - began, max(ended) - began, max(ended) - began)


class _Ray(Peer):
    through: Through = "memory"
    packages = ("ray",)

    def __init__(self, name: str, what: str, modules: tuple[str, ...] = ("ray",)) -> None:
        self.name = name
        self.what = what
        self._needs = Needs(modules, "pip install ray, for NIXL also pip install --no-deps nixl nixl-cu12")

    @property
    def environment(self) -> Mapping[str, str]:
        """Environment variables of Ray's processes: gloo on the loopback, no usage reports, no memory checks."""
        return {
            "GLOO_SOCKET_IFNAME": "lo",
            "PYTHONPATH": _ROOT,
            "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0",
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_memory_monitor_refresh_ms": "0",
        }

    def unavailable_reason(self) -> str | None:
        """Return why a needed module cannot be imported and how to install it, or None."""
        return self._needs.missing()

    @abstractmethod
    def connect(self, task: Task) -> Session:
        """Start the actors."""

    @contextmanager
    def open(self, task: Task) -> Iterator[Session]:
        """Start a Ray cluster for this peer alone and connect the actors in it; leaving shuts it down.

        Its object store has room for at least three payloads.
        """
        import ray

        with tempfile.TemporaryDirectory(
            prefix="ray", ignore_cleanup_errors=True
        ) as folder:  # a short path, for its sockets
            ray.init(
                address="local",
                num_cpus=task.receivers + 1,
                object_store_memory=max(128 << 20, 3 * task.workload.nbytes),
                include_dashboard=False,
                log_to_driver=False,
                logging_level="error",
                _temp_dir=folder,
                runtime_env={"env_vars": {**self.environment, "OMP_NUM_THREADS": "1"}},
            )
            try:
                session = self.connect(task)
                assert isinstance(session, _RaySession)
                session.get([each.digest.remote() for each in (session.sender, *session.receivers)])
                yield session
            finally:
                ray.shutdown()


class _ObjectStore(_Ray):
    def __init__(self, name: str, what: str, per_tensor: bool) -> None:
        super().__init__(name, what)
        self._per_tensor = per_tensor

    def connect(self, task: Task) -> Session:
        import ray

        return _Pulls(task, ray.remote(num_cpus=0)(_Node), "put_arrays", (self._per_tensor,), "get_arrays")


class _RdtGloo(_Ray):
    through: Through = "network"

    def connect(self, task: Task) -> Session:
        import ray
        from ray.experimental.collective import create_collective_group

        class Lender(_Node):
            @ray.method(tensor_transport="gloo")  # type: ignore[untyped-decorator]
            def lend(self) -> dict[str, torch.Tensor]:
                return super().lend()

        session = _Lends(task, ray.remote(num_cpus=0, enable_tensor_transport=True)(Lender))
        create_collective_group([session.sender, *session.receivers], backend="torch_gloo")
        return session


class _RdtNixl(_Ray):
    def connect(self, task: Task) -> Session:
        import ray

        actor = ray.remote(num_cpus=0, enable_tensor_transport=True)(_Node)
        return _Pulls(task, actor, "put_nixl", (), "get_nixl")


RAY: tuple[Peer, ...] = (
    _ObjectStore("ray-object-store", "ray.put of one dictionary of numpy views; ray.get, copy out", per_tensor=False),
    _ObjectStore("ray-object-store-per-tensor", "the same, an object per tensor", per_tensor=True),
    _RdtGloo("ray-rdt-gloo", "Ray Direct Transport over a gloo group of the actors, copy out"),
    _RdtNixl("ray-rdt-nixl", "Ray Direct Transport over NIXL, into the receivers' tensors", ("ray", "nixl._api")),
)
