"""The engine in one process, called as verl's manager calls it."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Iterable
from pathlib import Path
from typing import Any

import hydra
import pytest
import torch
from cpu_run import bits, facts
from omegaconf import OmegaConf
from verl.checkpoint_engine import CheckpointEngineRegistry
from verl.utils.config import omega_conf_to_dataclass
from verl.utils.import_utils import import_external_libs
from weightlane_verl import WeightlaneCheckpointEngine

from weightlane.ckpt_engines import (
    ClosedError,
    ConfigError,
    EngineUnavailableError,
    PeerLostError,
    ProtocolError,
    UnknownEngineError,
)

BUCKET = 1 << 20
NEVER_S = 1e6
Weights = Iterable[tuple[str, torch.Tensor]]


def engines(rollouts: int = 2, **options: Any) -> list[WeightlaneCheckpointEngine]:
    """A trainer's engine, and those of rollout workers."""
    options = {"bucket_mib": 1, "timeout_s": NEVER_S, **options}
    trainer = WeightlaneCheckpointEngine(BUCKET, is_master=True, **options)
    return [trainer, *(WeightlaneCheckpointEngine(BUCKET, **options) for _ in range(rollouts))]


async def connect(workers: list[WeightlaneCheckpointEngine]) -> None:
    metadata = [worker.prepare() for worker in workers]
    trainers, rollouts = WeightlaneCheckpointEngine.build_topology(1, len(workers) - 1, metadata)
    topologies = trainers["topology"] + rollouts["topology"]
    await asyncio.gather(
        *(
            asyncio.to_thread(worker.init_process_group, topology)
            for worker, topology in zip(workers, topologies, strict=True)
        )
    )


async def all_of(weights: AsyncIterator[tuple[str, torch.Tensor]]) -> list[tuple[str, torch.Tensor]]:
    return [each async for each in weights]


async def update(workers: list[WeightlaneCheckpointEngine], weights: Weights, step: int = 1) -> list[Any]:
    """One update of all workers. Returns the result or the error of each."""
    await connect(workers)
    trainer, *rollouts = workers
    calls = [all_of(rollout.receive_weights(step)) for rollout in rollouts]
    results = await asyncio.gather(trainer.send_weights(iter(weights), step), *calls, return_exceptions=True)
    for worker in workers:
        worker.finalize()
    return results


def test_the_sender_has_two_buckets_and_a_rollout_worker_what_it_yields(monkeypatch: pytest.MonkeyPatch) -> None:
    workers = engines()
    allocated: list[int] = []
    allocate = workers[0]._engine.allocate

    def counted(nbytes: int, device: torch.device) -> torch.Tensor:
        allocated.append(nbytes)
        return allocate(nbytes, device)

    monkeypatch.setattr(workers[0]._engine, "allocate", counted)
    weights = [(str(step), bits(step, torch.bfloat16, 200, 1000)) for step in range(20)]
    _, *received = asyncio.run(update(workers, weights))
    assert len(allocated) == 2
    assert BUCKET < max(allocated) < 1.1 * BUCKET
    for each in received:
        assert facts(each) == facts(weights)
        assert max(tensor.untyped_storage().nbytes() for _, tensor in each) <= BUCKET


def test_an_update_without_tensors_ends() -> None:
    assert asyncio.run(update(engines(), [])) == [{"checkpoint_engine/sent_bytes": 0.0}, [], []]


def test_a_name_that_fits_in_no_header_ends_the_update() -> None:
    weights = [("first", torch.ones(3)), ("x" * BUCKET, torch.ones(3)), ("last", torch.ones(3))]
    taken = []
    sent, *received = asyncio.run(update(engines(), (taken.append(name) or (name, tensor) for name, tensor in weights)))
    assert isinstance(sent, ProtocolError)
    assert all(isinstance(error, PeerLostError) for error in received)
    assert len(taken) == len(weights), "other trainer ranks gather these tensors together with rank 0"


def test_a_rollout_that_stops_early_ends_the_update() -> None:
    async def stop_early() -> list[Any]:
        trainer, quitter, other = workers = engines()
        await connect(workers)

        async def first_tensor() -> str:
            weights = quitter.receive_weights(1)
            name, _ = await anext(weights)
            await weights.aclose()
            return name

        weights = ((str(step), bits(step, torch.float32, 1000, 200)) for step in range(20))
        calls = trainer.send_weights(weights, 1), first_tensor(), all_of(other.receive_weights(1))
        return await asyncio.gather(*calls, return_exceptions=True)

    sent, name, received = asyncio.run(stop_early())
    assert isinstance(sent, PeerLostError)
    assert "rollout-" in sent.peer
    assert name == "0"
    assert isinstance(received, PeerLostError)


def test_a_call_of_a_failed_update_leaves_the_next_update_alone() -> None:
    async def two() -> tuple[list[Any], list[Any]]:
        workers = engines()
        await connect(workers)
        stale = asyncio.gather(*(all_of(worker.receive_weights(1)) for worker in workers[1:]), return_exceptions=True)
        await asyncio.sleep(0)
        return await update(workers, [("w", torch.ones(3)), ("large", torch.ones(3 * BUCKET))], 2), await stale

    (_, *received), errors = asyncio.run(two())
    assert all(isinstance(error, ClosedError | PeerLostError) for error in errors)
    assert all([name for name, _ in each] == ["w", "large"] for each in received)


def test_trainer_and_rollouts_agree_on_the_version() -> None:
    async def different() -> list[Any]:
        trainer, rollout = workers = engines(rollouts=1)
        await connect(workers)
        calls = trainer.send_weights(iter([("w", torch.ones(3))]), 1), all_of(rollout.receive_weights(2))
        return await asyncio.gather(*calls, return_exceptions=True)

    sent, received = asyncio.run(different())
    assert isinstance(sent, ProtocolError | PeerLostError)
    assert isinstance(received, ProtocolError)


def test_a_failed_version_does_not_replace_the_cached_one() -> None:
    def fails() -> Weights:
        yield "w", torch.zeros(3)
        yield "large", torch.zeros(BUCKET)
        raise ArithmeticError

    async def both() -> list[Any]:
        workers = engines(cache=True)
        first = await update(workers, [("w", torch.ones(3))])
        second = await update(workers, fails(), step=2)
        return [first, second, [await all_of(rollout.get_weights()) for rollout in workers[1:] for _ in range(2)]]

    first, second, cached = asyncio.run(both())
    assert [first[1], first[1], first[2], first[2]] == cached
    assert [type(error) for error in second] == [ArithmeticError, PeerLostError, PeerLostError]


def test_the_configuration_of_the_readme_makes_the_engine() -> None:
    (block,) = re.findall(r"```yaml\n(.*?)```", (Path(__file__).parents[1] / "README.md").read_text(), re.DOTALL)
    with hydra.initialize_config_module("verl.trainer.config", version_base=None):
        config = hydra.compose("ppo_trainer")
    OmegaConf.set_struct(config, False)
    config = OmegaConf.merge(config, OmegaConf.create(block.replace("eth0", "lo")))
    found = omega_conf_to_dataclass(config.actor_rollout_ref.rollout.checkpoint_engine)
    import_external_libs(found.custom_backend_module)
    engine = CheckpointEngineRegistry.new(
        found.backend,
        is_master=True,
        bucket_size=found.update_weights_bucket_megabytes << 20,
        **found.engine_kwargs[found.backend],
    )
    assert isinstance(engine, WeightlaneCheckpointEngine)
    assert engine._engine.registered_as == "gloo"
    assert engine._engine.config.interface == "lo"


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        ({"engine": "smh"}, UnknownEngineError, "Did you mean 'shm'"),
        ({"engine": "nccl"}, (ConfigError, EngineUnavailableError), "nccl"),
        ({"options": {"socket_dri": "/tmp"}}, ConfigError, "socket_dri"),
        ({"timeout_s": 0}, ConfigError, "timeout_s is 0"),
        ({"bucket_mib": 0}, ConfigError, "bucket_mib is 0"),
        ({"enigne": "shm"}, ConfigError, r"no key enigne.*keys are engine, options, bucket_mib, timeout_s, cache\."),
    ],
    ids=str,
)
def test_what_cannot_be_is_refused_when_the_workers_start(options: dict[str, Any], error: Any, text: str) -> None:
    with pytest.raises(error, match=text):
        WeightlaneCheckpointEngine(BUCKET, **options)


def test_calls_in_the_wrong_order_are_refused() -> None:
    trainer, rollout = engines(rollouts=1)
    with pytest.raises(ClosedError, match="not connected"):
        asyncio.run(trainer.send_weights(iter([]), 1))
    with pytest.raises(ClosedError, match="not connected"):
        asyncio.run(all_of(rollout.receive_weights(1)))
    with pytest.raises(ClosedError, match="no version is cached"):
        asyncio.run(all_of(rollout.get_weights()))
    with pytest.raises(ConfigError, match="is_master"):
        WeightlaneCheckpointEngine.build_topology(1, 1, [rollout.prepare(), trainer.prepare()])
    trainer.finalize()
    rollout.finalize()
