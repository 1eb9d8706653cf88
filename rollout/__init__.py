"""Rollout: replicas that generate without a break and take over new weights between two decode steps.

`replicas` has the three kinds of replicas, and `commit` puts a version into service. `contract` is what a rollout engine has to
keep, `conformance` its suite, and `engine_toolkit` its parts. `vllm` is an engine, and `engines` has the others. `vllm_trainer`
is for trainers that use vLLM's own factory, `layout` finds out where weights go in vLLM, `vllm_surface` names the internals of
vLLM that are used, and `vllm_cpu` works around bugs of its CPU build.

Importing this package needs neither vLLM nor Ray; starting a replica does.

    >>> from weightlane.rollout import RolloutConfig
    >>> RolloutConfig(replicas=2).kv_on_commit
    'recompute'

A replica's life, in a coroutine, with Ray initialized:

    [replica] = await start_replicas(RolloutConfig(), "path/to/model")
    await replica.connect({"host": "127.0.0.1", "port": 29500}, "shm")
    completion = await replica.generate("r0", [1, 2, 3], 16)
    report = await replica.commit(1)  # a version that the coordinator reported staged
    await replica.close()
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .config import RolloutConfig
    from .contract.records import Completion, RolloutStats
    from .replicas.local_replica import LocalReplica
    from .replicas.ray_actor import RolloutReplica, start_replicas
    from .replicas.server_replica import ServerReplica

_HOME = {
    "Completion": "contract.records",
    "RolloutConfig": "config",
    "RolloutReplica": "replicas.ray_actor",
    "RolloutStats": "contract.records",
    "LocalReplica": "replicas.local_replica",
    "ServerReplica": "replicas.server_replica",
    "start_replicas": "replicas.ray_actor",
}

__all__ = [
    "Completion",
    "LocalReplica",
    "RolloutConfig",
    "RolloutReplica",
    "RolloutStats",
    "ServerReplica",
    "start_replicas",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f".{_HOME[name]}", __name__), name)


def __dir__() -> list[str]:
    return sorted(__all__)
