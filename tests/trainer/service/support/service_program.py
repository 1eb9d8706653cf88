"""A service in one process, with one trainer rank and, if asked for, one replica: what `weightlane tinker` composes, without Ray.

    python service_program.py MODEL DIRECTORY PORT_FILE JSON

It writes its port when it answers. JSON has the service's settings, and ``replica`` for those of a replica.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

from weightlane.rollout.config import AdapterConfig, RolloutConfig
from weightlane.rollout.layout.loading.adapter_tensors import adapted_layers
from weightlane.rollout.replicas.local_replica import LocalReplica
from weightlane.sync import CheckpointEngineConfig, Coordinator, Rendezvous, SyncConfig, dtype_of
from weightlane.trainer.algorithms.roles import POLICY
from weightlane.trainer.config import LoraConfig, TrainerConfig
from weightlane.trainer.dispatch.dispatch import WorkerDispatch
from weightlane.trainer.dispatch.ranks import LocalRanks
from weightlane.trainer.dispatch.role_spec import RoleSpec
from weightlane.trainer.engines.hf.model_dir import check_model_dir
from weightlane.trainer.runner.runner import Runner
from weightlane.trainer.service.config import ServedModel, ServiceConfig
from weightlane.trainer.service.http.auth import Clients
from weightlane.trainer.service.http.server import listening, serve
from weightlane.trainer.service.service import Service


async def main(model_dir: Path, directory: Path, port_file: Path, settings: dict[str, Any]) -> None:
    replica_settings = settings.pop("replica", None)
    trainer = settings.pop("trainer", {})
    config = ServiceConfig.model_validate({"port": 0, "max_lora_rank": 8, "shutdown_s": 20, **settings})
    model = check_model_dir(model_dir)
    adapter = AdapterConfig(rank=config.max_lora_rank, alpha=config.lora_alpha)
    whole = config.trains == "all_weights"
    ended = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, ended.set)
    async with AsyncExitStack() as stack:
        listener = stack.enter_context(listening(config.host, config.port))
        lora = None if whole else LoraConfig(rank=adapter.rank, alpha=adapter.alpha, publish="adapter")
        role = RoleSpec(POLICY, TrainerConfig(device="cpu", lora=lora, frozen=not whole, **trainer), model.path)
        dispatch = WorkerDispatch([role], {"trainer": LocalRanks()})
        stack.push_async_callback(dispatch.close)
        await dispatch.start()
        rendezvous = Rendezvous.host("127.0.0.1", 0)
        replicas, sync = [], SyncConfig(wire_dtype="float32")
        if replica_settings is not None:
            adapters = {} if whole else {"adapter": adapter}
            rollout = RolloutConfig.model_validate({"dtype": "float32", **adapters, **replica_settings})
            replica = LocalReplica("rollout-0", rollout, model.path)
            stack.push_async_callback(replica.close)
            await replica.start()
            replicas.append(replica)
        coordinator = Coordinator(rendezvous, dispatch[POLICY].publisher_names(), replicas, sync)
        stack.callback(coordinator.close)
        if replicas:
            engine, address = CheckpointEngineConfig(backend="shm"), rendezvous.address.to_plain()
            await asyncio.gather(
                dispatch[POLICY].connect(address, engine, sync, dtype_of("float32")),
                *(each.connect(address, engine.backend) for each in replicas),
            )
            await coordinator.connect()
        layers = {
            name.rpartition(".")[2]: "attention" if "attn" in name else "mlp"
            for name in adapted_layers(model.path, adapter)
        }
        longest = min((each.max_model_len for each in replicas), default=64)
        base = ServedModel(
            "tiny", model.architecture, model.path, model.vocab_size, longest, model.eos_token_ids, layers
        )
        runner = Runner(dispatch)
        stack.push_async_callback(runner.close)
        service = Service(config, directory, base, runner, coordinator, replicas, _announced, sync.deadline_s)
        stack.push_async_callback(service.close)
        partial = port_file.with_suffix(".partial")
        partial.write_text(str(listener.getsockname()[1]))
        partial.rename(port_file)
        await serve(service, Clients(config), listener, ended)


def _announced(config: LoraConfig) -> AdapterConfig:
    return AdapterConfig(rank=config.rank, alpha=config.alpha, targets=config.targets)


if __name__ == "__main__":
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    asyncio.run(main(*map(Path, sys.argv[1:4]), json.loads(sys.argv[4])))
