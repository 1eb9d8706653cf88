"""Fills in missing settings from the model's size and the available GPUs, and refuses a run that does not fit."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from weightlane.ckpt_engines import CheckpointEngineRegistry, ConfigError
from weightlane.rollout.config import GPU_SHARE, START_TIMEOUT_S
from weightlane.rollout.layout.loading.adapter_tensors import adapter_elements
from weightlane.sync import dtype_of
from weightlane.trainer.algorithms.composition import role_names
from weightlane.trainer.algorithms.roles import POLICY, REFERENCE
from weightlane.trainer.config import TrainerConfig
from weightlane.trainer.dispatch.role_spec import POLICY_GROUP
from weightlane.trainer.engines.hf.model_dir import ModelInfo, weight_elements

from ..config.run_config import ClusterConfig

_Config = TypeVar("_Config", bound=ClusterConfig)
_PART = "resources"
_GB = 1e9
_START_S_PER_GB = 30.0
"""Seconds to load a model, and twice more to rehearse, from a disk that reads 100 MB/s."""
OVERHEAD_BYTES = 2 << 30
"""Memory of a device that the CUDA context, communicators and libraries take."""
_KV_BYTES = 1 << 30
"""Smallest KV cache with which serving is useful."""
_TRAINED_BYTES = 8
"""Bytes per parameter, over all ranks that share the model: float32 weight and gradient."""
_MOMENT_BYTES = {"adamw_bf16": 4, "adamw_8bit": 3}
"""Most bytes per parameter of the optimizer's moments, by its name. Others have two float32 moments, or fewer."""
_ADAPTED_BYTES = 8
"""Most bytes per parameter with ``trainer.lora``: the weight, float32 unless the checkpoint has half precision, and the float32
weight with the adapter added, which is published. Versions that are adapters do not need the latter."""
_FROZEN_BYTES = 4
"""Bytes per parameter of a frozen model: float32 weight."""


@dataclass(frozen=True, slots=True)
class Machines:
    """The GPUs that a run can use."""

    gpus: int
    gpu_bytes: int = 0
    """Memory of the smallest GPU; 0 if it is unknown."""
    serves_on_gpus: bool | None = None
    """Whether rollouts use GPUs; None: unless the vLLM that is installed here was built for CPUs."""

    @classmethod
    def here(cls) -> Machines:
        """Return the GPUs of this machine."""
        import torch  # noqa: PLC0415 - takes seconds

        count = torch.cuda.device_count()
        return cls(count, min((torch.cuda.get_device_properties(n).total_memory for n in range(count)), default=0))

    def gpus_of_rollouts(self) -> float:
        """Return the GPUs of a rollout rank that no setting says."""
        serves = not vllm_is_for_cpus() if self.serves_on_gpus is None else self.serves_on_gpus
        return float(self.gpus > 0 and serves)


@dataclass(frozen=True, slots=True)
class Sizes:
    """Sizes of the run's model, in bytes unless stated otherwise."""

    parameters: int
    """Number of elements."""
    version: int
    """Bytes of a version on the wire."""
    share: int
    """Approximate bytes of the model on one rollout rank."""
    staged: int
    """Approximate bytes of a version on one rollout rank: its share of the model, or a full adapter."""
    trained: int
    """Bytes of weights, gradients and optimizer state of one trainer rank, if they are split over all ranks: those of all roles
    that are on the device together, each as large as the policy."""
    own: Mapping[str, int] = field(default_factory=dict)
    """The same of one rank of each further group, by its name."""

    @classmethod
    def of(cls, config: ClusterConfig, model: ModelInfo) -> Sizes:
        """Return the sizes of `model`. Weights are sent in the checkpoint's dtype unless the configuration names another."""
        parameters = weight_elements(model.path)
        configured = (config.sync.wire_dtype, config.rollout.dtype, model.dtype)
        dtype = next(name for name in configured if name != "auto")
        version = parameters * dtype_of(dtype).itemsize
        share = staged = -(-version // min(config.rollout.by_size))
        trained = _TRAINED_BYTES + _MOMENT_BYTES.get(config.trainer.optimizer, 8)
        policy = trained if config.trainer.lora is None else _ADAPTED_BYTES
        if config.rollout.adapter is not None:
            version = staged = adapter_elements(model.path, config.rollout.adapter) * dtype_of(dtype).itemsize
            policy = _FROZEN_BYTES
        bytes_of = {POLICY: policy, REFERENCE: _FROZEN_BYTES}
        kept = {role: bytes_of.get(role, trained) for role in role_names(config.algorithm)}
        groups = config.rank_groups
        own = {name: -(-parameters * kept.pop(name) // group.ranks) for name, group in groups.items() if name in kept}
        in_turns = config.trainer.offload_roles or config.trainer.colocate
        state = max(kept.values()) if in_turns else sum(kept.values())
        return cls(parameters, version, share, staged, -(-parameters * state // config.trainer.ranks), own)


def fitted(config: _Config, sizes: Sizes, machines: Machines, *, counted: bool = True) -> _Config:
    """Return `config` with every setting that follows from the model's size and the GPUs.

    The number of GPUs is only checked if `counted`, that is if `machines` are those of the run.

    Raises `ConfigError`, which names the resource that does not suffice and the settings to change.
    """
    trainer, rollout = config.trainer, config.rollout
    trainer_gpus = _trainer_gpus(config.rank_groups, machines)
    rollout_gpus = rollout.gpus_per_rank
    if rollout_gpus is None:
        rollout_gpus = machines.gpus_of_rollouts()
    if counted:
        _check_gpus(config, trainer_gpus, rollout_gpus, machines)
        if rollout.autoscale and not rollout.cpus_per_rank and not rollout_gpus:
            raise ConfigError(
                "rollout.autoscale counts the replicas that there is room for, and their ranks reserve nothing.",
                part=_PART,
                hint="Raise rollout.cpus_per_rank or rollout.gpus_per_rank.",
            )
    staging, share = _staging(config, sizes, machines.gpu_bytes if rollout_gpus else 0)
    start_s = rollout.start_timeout_s
    if start_s is None:
        start_s = START_TIMEOUT_S + _START_S_PER_GB * sizes.share / _GB
    return config.model_copy(
        update={
            "trainer": trainer.model_copy(update={"gpus_per_rank": trainer_gpus}),
            "rollout": rollout.model_copy(
                update={
                    "gpus_per_rank": rollout_gpus,
                    "staging_limit_bytes": staging,
                    "gpu_memory_utilization": share,
                    "start_timeout_s": start_s,
                }
            ),
        }
    )


def check_gpus(config: ClusterConfig, machines: Machines) -> None:
    """Raise `ConfigError` if a run of `config`, which is `fitted`, needs more GPUs than `machines` have."""
    _check_gpus(config, _trainer_gpus(config.rank_groups, machines), config.rollout.gpus_per_rank or 0.0, machines)


def refuse_unfitting(config: ClusterConfig, model: ModelInfo, machines: Machines | None = None) -> None:
    """Raise the `ConfigError` with which the start of `config` would fail, because it does not fit `machines`; None: this one.

    With ``ray.address``, the number of GPUs is not checked, since the cluster may have more than this machine.
    """
    counted = machines is not None or not config.ray.address
    fitted(config, Sizes.of(config, model), machines or Machines.here(), counted=counted)


def fitted_trainer(
    trainer: TrainerConfig,
    machines: Machines,
    groups: Mapping[str, TrainerConfig] | None = None,
    *,
    counted: bool = True,
) -> TrainerConfig:
    """Return `trainer` with its GPUs, for a program that has no rollouts, and ranks in `groups`; None: the policy's alone.

    See `fitted`. Raises `ConfigError` if there are too few GPUs.
    """
    groups = groups or {POLICY_GROUP: trainer}
    gpus = _trainer_gpus(groups, machines)
    needed = gpus * sum(group.ranks for group in groups.values())
    if counted and needed > machines.gpus:
        raise ConfigError(
            f"{_ranks_of(groups)} x {gpus:g} GPUs need {needed:g} GPUs, but there are {machines.gpus}.",
            part=_PART,
            hint=f"Lower {_settings_of(groups)}.",
        )
    return trainer.model_copy(update={"gpus_per_rank": gpus})


def reserved_cpus(config: ClusterConfig) -> float:
    """Return the CPUs that Ray reserves for the processes of a run, once it has as many replicas as it may have."""
    rollout = config.rollout
    ranks = rollout.ranks + max(0, (rollout.max_replicas or 0) - rollout.replicas) * rollout.tensor_parallel
    return cpus_of(config.rank_groups) + ranks * rollout.cpus_per_rank


def cpus_of(groups: Mapping[str, TrainerConfig]) -> float:
    """Return the CPUs that Ray reserves for trainer ranks in `groups`."""
    return sum(group.ranks * group.cpus_per_rank for group in groups.values())


def _ranks_of(groups: Mapping[str, TrainerConfig]) -> str:
    """Return the number of ranks of each group in words."""
    return f"{', '.join(f'{group.ranks} {name}' for name, group in groups.items())} ranks"


def _settings_of(groups: Mapping[str, TrainerConfig]) -> str:
    """Return the settings of the groups' numbers of ranks in words."""
    return " or ".join(f"{name}.ranks" for name in groups)


def _trainer_gpus(groups: Mapping[str, TrainerConfig], machines: Machines) -> float:
    trainer = groups[POLICY_GROUP]
    gpus = trainer.gpus_per_rank
    if gpus is not None:
        several = {name: group for name, group in groups.items() if group.ranks > 1}
        if several and 0 < gpus < 1 and trainer.device != "cpu":
            raise ConfigError(
                f"{_ranks_of(several)} of {gpus:g} GPUs each would share one, and NCCL refuses ranks that share a GPU.",
                part=_PART,
                hint=f"Lower {_settings_of(several)} to 1, or raise trainer.gpus_per_rank to 1.",
            )
        return gpus
    return float(machines.gpus > 0 and trainer.device != "cpu")


def _check_gpus(config: ClusterConfig, trainer_gpus: float, rollout_gpus: float, machines: Machines) -> None:
    """Raise `ConfigError` if there are too few GPUs, for which Ray would wait for ever."""
    groups, ranks = config.rank_groups, config.rollout.ranks
    if config.trainer.colocate:
        if rollout_gpus and ranks > config.trainer.ranks:
            raise ConfigError(
                f"{ranks} rollout ranks would share the GPUs of {config.trainer.ranks} trainer ranks (trainer.colocate).",
                part=_PART,
                hint="Raise trainer.ranks, or lower rollout.replicas or rollout.tensor_parallel.",
            )
        ranks = 0
    needed = trainer_gpus * sum(group.ranks for group in groups.values()) + ranks * rollout_gpus
    if needed > machines.gpus:
        raise ConfigError(
            f"{_ranks_of(groups)} x {trainer_gpus:g} and {ranks} rollout ranks x {rollout_gpus:g} GPUs need {needed:g}"
            f" GPUs, but there are {machines.gpus}.",
            part=_PART,
            hint=f"Lower {_settings_of(groups)}, rollout.replicas or rollout.tensor_parallel. A single trainer rank may share its"
            " GPU with a rollout rank: set gpus_per_rank of both to 0.5, rollout.gpu_memory_utilization to the share of vLLM, and"
            ' checkpoint_engine.backend to another one than "nccl".',
        )


def _staging(config: ClusterConfig, sizes: Sizes, gpu_bytes: int) -> tuple[int, float]:
    """Return the bytes for staged versions, and the share of the device that vLLM gets."""
    rollout = config.rollout
    engine = CheckpointEngineRegistry().engine_class(config.checkpoint_engine.backend)
    bucket = 2 * config.sync.bucket_bytes
    smallest = min(config.sync.bucket_bytes, sizes.version)
    limit = rollout.staging_limit_bytes
    if rollout.commit == "in_place" and limit is not None and limit < smallest and not engine.capabilities.views:
        raise ConfigError(
            f"rollout.staging_limit_bytes is {limit}, and versions are written in place from buckets of {smallest} bytes.",
            part=_PART,
            hint="Lower sync.bucket_mib, or raise rollout.staging_limit_bytes.",
        )
    choices = [rollout.staging_limit_bytes] if rollout.staging_limit_bytes is not None else []
    if not choices and rollout.commit == "in_place":
        choices = [bucket]
    # Padding for kernels, and tensors that every rank holds completely, make a staged version larger than the share.
    one = sizes.staged + sizes.staged // 8 + bucket
    choices = choices or [2 * one, one]
    if not gpu_bytes or "cuda" not in engine.capabilities.devices:
        return choices[0], rollout.gpu_memory_utilization or GPU_SHARE
    for staging in choices:
        most = (gpu_bytes - staging - OVERHEAD_BYTES - _kept_by_trainer(config, sizes)) / gpu_bytes
        share = rollout.gpu_memory_utilization or min(GPU_SHARE, most)
        if share <= most and share * gpu_bytes >= sizes.share + _KV_BYTES:
            return staging, round(share, 3)
    raise ConfigError(
        f"a rollout rank holds {sizes.share / _GB:.1f} GB of the model, and a staged version needs {choices[-1] / _GB:.1f} GB"
        f" more. With vLLM's cache that exceeds the {gpu_bytes / _GB:.0f} GB of a GPU.",
        part=_PART,
        hint='Raise rollout.tensor_parallel, or set rollout.commit = "in_place", which only needs memory for a bucket.',
    )


def _kept_by_trainer(config: ClusterConfig, sizes: Sizes) -> int:
    """Return the bytes that a trainer rank keeps on a device that it shares, while rollouts use it: context and snapshot."""
    return OVERHEAD_BYTES + sizes.version // config.trainer.ranks if config.trainer.colocate else 0


def vllm_is_for_cpus() -> bool:
    """Whether the installed vLLM was built for CPUs."""
    # By the folder of its metadata: to find the distribution of a module, Python reads the list of files of every one.
    return any("cpu" in info.name for folder in sys.path for info in Path(folder).glob("vllm*-info"))


def described(config: ClusterConfig, sizes: Sizes, machines: Machines) -> Sequence[tuple[str, str]]:
    """Return name and amount of each resource that a run of the `fitted` configuration needs."""
    rollout, ranks = config.rollout, config.rollout.ranks
    state = "GB each for weights, gradients and optimizer if split over all ranks, plus activations"
    return [
        ("model", f"{sizes.parameters / _GB:.3g} billion parameters, {sizes.version / _GB:.3g} GB a version"),
        ("machine", described_machines(machines)),
        *(
            (
                name,
                f"{group.ranks} ranks x {group.gpus_per_rank:g} GPUs, {sizes.own.get(name, sizes.trained) / _GB:.3g} {state}",
            )
            for name, group in config.rank_groups.items()
        ),
        (
            "rollout",
            f"{ranks} ranks x {rollout.gpus_per_rank:g} GPUs, {sizes.share / _GB:.3g} GB of the model each, plus"
            f" {(rollout.staging_limit_bytes or 0) / _GB:.3g} GB for staged versions"
            + (f"; {rollout.gpu_memory_utilization:.0%} of a GPU for vLLM" if rollout.gpus_per_rank else ""),
        ),
        ("start-up", f"a replica may take {rollout.start_limit_s:.0f} s"),
    ]


def described_machines(machines: Machines) -> str:
    """Return number and memory of the GPUs in words."""
    if not machines.gpus:
        return "no GPU"
    return f"{machines.gpus} GPUs" + (f" of {machines.gpu_bytes / _GB:.0f} GB" if machines.gpu_bytes else "")
