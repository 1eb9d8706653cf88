"""The parts of a verl run that need no GPU here: the trainers' model engine and the rollouts' inference engine are replaced.

verl's manager, worker groups, workers and replicas are its own. What stands for the model engine gathers each tensor by a
collective of all trainer ranks, as FSDP does, and overwrites it when the next one is requested.
"""

from __future__ import annotations

import os
import signal
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from types import SimpleNamespace
from typing import Any

import ray
import torch
import torch.distributed as dist
from ray.exceptions import RayError
from verl.checkpoint_engine import CheckpointEngineManager, CheckpointEngineRegistry, CheckpointEngineWorker
from verl.single_controller.base import Worker
from verl.single_controller.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup
from verl.utils.distributed import initialize_global_process_group_ray
from verl.utils.import_utils import import_external_libs
from verl.workers.config import CheckpointEngineConfig, RolloutConfig
from verl.workers.engine_workers import ActorRolloutRefWorker
from verl.workers.rollout import RolloutReplica

DTYPES = (
    torch.bfloat16, torch.float16, torch.float32, torch.float64, torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e8m0fnu,
    torch.int64, torch.int32, torch.int8, torch.uint8, torch.uint16, torch.complex64,
)  # fmt: skip
HANG_S = 300.0
"""Seconds after which a call counts as hanging."""
SMALL = 1500
"""Number of small tensors: more than a header describes."""


def bits(step: int, dtype: torch.dtype, *shape: int) -> torch.Tensor:
    """Random bits, among them those of NaN."""
    nbytes = dtype.itemsize * torch.Size(shape).numel()
    data = torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=torch.Generator().manual_seed(step))
    return data.view(dtype).reshape(shape)


def gathered(step: int) -> dict[str, torch.Tensor]:
    """The tensors of a version as the trainer ranks hold them."""
    tensors = {f"layers.{index}.{dtype}": bits(step, dtype, 7, index) for index, dtype in enumerate(DTYPES, 1)}
    tensors |= {
        "embed": bits(step, torch.bfloat16, 1000, 257),
        "scalar": bits(step, torch.float32),
        "empty": bits(step, torch.bfloat16, 0, 7),
        "transposed": bits(step, torch.bfloat16, 33, 65),
        "transposed and large": bits(step, torch.float32, 300, 401),
        "every second": bits(step, torch.float16, 50),
        "repeated": bits(step, torch.float16, 3, 1),
        "mask": bits(step, torch.uint8, 9) > 127,
    }
    return tensors | {
        f"small.{index}.of.a.name.of.usual.length": bits(step + index, torch.float32, 3) for index in range(SMALL)
    }


def laid_out(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """The view of the gathered tensor that the generator yields."""
    if name.startswith("transposed"):
        return tensor.t()
    if name == "every second":
        return tensor[::2]
    if name == "repeated":
        return tensor.expand(3, 4)
    return torch.nn.Parameter(tensor) if name == "embed" else tensor


def sent(step: int) -> dict[str, torch.Tensor]:
    """The tensors that the trainers' generator yields."""
    return {name: laid_out(name, tensor) for name, tensor in gathered(step).items()}


def content_of(tensor: torch.Tensor) -> torch.Tensor:
    """The bits of a tensor."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


class ModelEngine:
    """Stands for verl's model engine."""

    step, dies_at, raises_at = 0, "", ""

    def get_per_tensor_param(self) -> tuple[Iterator[tuple[str, torch.Tensor]], None]:
        return self._tensors(), None

    def _tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        rank, world_size = dist.get_rank(), dist.get_world_size()
        for index, (name, mine) in enumerate(gathered(self.step).items()):
            if name == self.dies_at:
                os.kill(os.getpid(), signal.SIGKILL)
            if name == self.raises_at:
                raise ArithmeticError("no such weight")
            tensor = mine if rank == index % world_size else torch.empty_like(mine)
            content = tensor.reshape(-1).view(torch.uint8)
            if content.numel():
                dist.broadcast(content, index % world_size)
            yield name, laid_out(name, tensor)
            content.fill_(255)


class Trainer(ActorRolloutRefWorker):
    """verl's actor worker without a model; `update_weights` and `execute_checkpoint_engine` are verl's."""

    def __init__(self, config: CheckpointEngineConfig) -> None:
        Worker.__init__(self)
        initialize_global_process_group_ray(backend="cpu:gloo")
        self.actor = SimpleNamespace(engine=ModelEngine())
        use_engine(self, config)


class Rollout:
    """Stands for the adapter of an inference engine: keeps what it is given, without a copy."""

    replica_rank, is_leader_rank = 0, True
    dies_at, freezes_at = "", ""

    def __init__(self) -> None:
        self.received: dict[str, torch.Tensor] = {}

    async def update_weights(
        self, weights: AsyncIterator[tuple[str, torch.Tensor]], global_steps: int | None, wire_format: str
    ) -> None:
        assert wire_format == "named_tensors"
        self.received = {}
        async for name, tensor in weights:
            if name == self.dies_at:
                os.kill(os.getpid(), signal.SIGKILL)
            if name == self.freezes_at:
                os.kill(os.getpid(), signal.SIGSTOP)
            assert name not in self.received
            self.received[name] = tensor


class Replica(RolloutReplica):
    """verl's replica without servers."""

    on_abort: Callable[[], None] | None = None

    async def launch_servers(self) -> None:
        pass

    async def abort_all_requests(self, **options: Any) -> None:
        if self.on_abort is not None:
            self.on_abort()


def use_engine(worker: Any, config: CheckpointEngineConfig) -> None:
    """Give a worker another checkpoint engine, as its constructor does."""
    import_external_libs(config.custom_backend_module)
    role = {"is_master": dist.get_rank() == 0} if isinstance(worker, Trainer) else {}
    worker.checkpoint_engine = CheckpointEngineRegistry.new(
        config.backend,
        bucket_size=config.update_weights_bucket_megabytes << 20,
        **role,
        **config.engine_kwargs.get(config.backend, {}),
    )


def engine_config(**options: Any) -> CheckpointEngineConfig:
    """Configuration with buckets so small that a version takes many."""
    return CheckpointEngineConfig(
        backend="weightlane",
        custom_backend_module="weightlane_verl",
        engine_kwargs={"weightlane": {"bucket_mib": 0.125, **options}},
    )


class Run:
    """Two trainer ranks, and replicas of one rollout worker each."""

    def __init__(self, replicas: int) -> None:
        config = engine_config(engine="shm")
        rollout_config = RolloutConfig(name="vllm", tensor_model_parallel_size=1, checkpoint_engine=config)
        self.trainers = _workers(2, RayClassWithInitArgs(cls=ray.remote(Trainer), config=config))
        rollout = RayClassWithInitArgs(
            cls=ray.remote(CheckpointEngineWorker),
            rollout_config=rollout_config,
            model_config=None,
            server_adapter=Rollout(),
        )
        self.rollouts = _workers(replicas, rollout)
        self.replicas = [Replica(rank, rollout_config, None) for rank in range(replicas)]
        for rank, replica in enumerate(self.replicas):
            replica.workers = self.rollouts.workers[rank : rank + 1]
        self.trainer_pids, self.rollout_pids = (
            ray.get([worker.__ray_call__.remote(lambda _: os.getpid()) for worker in group.workers])
            for group in (self.trainers, self.rollouts)
        )

    def manager(
        self, replicas: list[Replica], kind: type[CheckpointEngineManager] = CheckpointEngineManager, **options: Any
    ) -> CheckpointEngineManager:
        """A manager of the replicas, all of whose workers use an engine with these options and are to fail nowhere."""
        self.set(raises_at="", dies_at="")
        for replica in replicas:
            set_rollout(replica, freezes_at="", dies_at="")
            replica.on_abort = None
        config = engine_config(**options)
        workers = [*self.trainers.workers, *(worker for replica in replicas for worker in replica.workers)]
        ray.get([worker.__ray_call__.remote(use_engine, config) for worker in workers])
        return kind(config=config, actor_wg=self.trainers, replicas=list(replicas))

    def set(self, **values: Any) -> None:
        """Set attributes of the trainers' model engines."""
        ray.get([worker.__ray_call__.remote(_set_all, "actor.engine", values) for worker in self.trainers.workers])

    def update(self, manager: CheckpointEngineManager, step: int) -> dict[str, Any]:
        """Let `manager` bring version `step` to its replicas."""
        self.set(step=step)
        return manager.update_weights(global_steps=step)


def connect(run: Run, manager: CheckpointEngineManager) -> RayWorkerGroup:
    """Connect as `manager` does, and return its rollout workers."""
    workers = [worker for replica in manager.replicas for worker in replica.workers]
    ray_class = RayClassWithInitArgs(cls=ray.remote(CheckpointEngineWorker))
    rollouts = RayWorkerGroup(worker_handles=workers, ray_cls_with_init=ray_class)
    manager.build_process_group(rollouts)
    return rollouts


def begin(run: Run, rollouts: RayWorkerGroup, step: int) -> tuple[list[ray.ObjectRef], list[ray.ObjectRef]]:
    """Make the calls with which the manager sends and receives: those of the trainers, and of the rollout workers."""
    run.set(step=step)
    sends = run.trainers.update_weights(global_steps=step, mode="weightlane")
    return sends, rollouts.update_weights(global_steps=step)


def outcome(call: ray.ObjectRef) -> Any:
    """The result or the error of a call."""
    try:
        return ray.get(call, timeout=HANG_S)
    except RayError as error:
        return error


def outcomes(run: Run, manager: CheckpointEngineManager, step: int) -> tuple[list[Any], list[Any]]:
    """The result or the error of every trainer rank and of every rollout worker in an update."""
    sends, receives = begin(run, connect(run, manager), step)
    return [outcome(call) for call in sends], [outcome(call) for call in receives]


def facts(tensors: Iterable[tuple[str, torch.Tensor]]) -> dict[str, tuple[torch.dtype, list[int], bytes]]:
    """Dtype, shape and bits of each tensor by its name, in the given order."""
    return {name: (tensor.dtype, list(tensor.shape), content_of(tensor).numpy().tobytes()) for name, tensor in tensors}


def received_by(replica: Replica) -> dict[str, Any]:
    """The facts of the tensors that the replica was given last."""
    (worker,) = replica.workers
    return ray.get(worker.__ray_call__.remote(lambda self: facts(self.server_adapter.received.items())))


def cached_by(replica: Replica) -> dict[str, Any]:
    """The facts of the tensors that the replica's checkpoint engine has in its cache."""
    (worker,) = replica.workers
    return ray.get(worker.__ray_call__.remote(lambda self: facts(self.checkpoint_engine._cached)))


def set_rollout(replica: Replica, **values: Any) -> None:
    """Set attributes of what stands for the replica's inference engine."""
    ray.get([worker.__ray_call__.remote(_set_all, "server_adapter", values) for worker in replica.workers])


def _set_all(worker: Any, path: str, values: dict[str, Any]) -> None:
    for part in path.split("."):
        worker = getattr(worker, part)
    for name, value in values.items():
        setattr(worker, name, value)


def _workers(count: int, ray_class: RayClassWithInitArgs) -> RayWorkerGroup:
    pool = RayResourcePool([count], use_gpu=False, max_colocate_count=1)
    return RayWorkerGroup(resource_pool=pool, ray_cls_with_init=ray_class, use_gpu=False, device_name="cpu")
