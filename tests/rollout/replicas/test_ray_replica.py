"""A replica in another process, also in a Ray actor: the same promises, and nothing left behind when that process is killed."""

from __future__ import annotations

import asyncio
import os
import signal
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
from json_program import Program
from publishing import OneRankTrainer
from tiny_models import check_switch, greedy_tokens, make_llama
from waiting import HANG_S, wait_until

from weightlane.ckpt_engines import ConfigError, QuarantinedError, StorageError, WorkerDiedError
from weightlane.rollout import RolloutConfig, RolloutReplica, start_replicas
from weightlane.rollout.config import AdapterConfig
from weightlane.rollout.contract.named_segments import segments_of_trees

pytestmark = [pytest.mark.vllm, pytest.mark.slow]


def test_a_replica_whose_process_is_killed_leaves_no_process_and_no_shared_memory(tmp_path: Path) -> None:
    owner = Program(Path(__file__).with_name("replica_process.py"))
    try:
        owner.call("start", str(make_llama(tmp_path / "model", seed=0)))
        children = psutil.Process(owner.process.pid).children(recursive=True)
        segments = segments_of_trees([owner.process.pid])
        assert len(children) >= 2, "an engine core and its rank"
        assert segments
        owner.process.kill()
        wait_until_gone(children)
        wait_until(lambda: not [segment for segment in segments if segment.exists()], "removal of the shared memory")
    finally:
        owner.kill()


def wait_until_gone(processes: list[psutil.Process]) -> None:
    def gone(process: psutil.Process) -> bool:
        with suppress(psutil.NoSuchProcess):  # it may end between the two questions
            return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
        return True

    wait_until(lambda: all(map(gone, processes)), "end of what a killed actor has started")


@pytest.mark.ray
@pytest.mark.exhaustive
def test_a_replica_in_ray_takes_versions_in_flight_and_its_killed_actor_leaves_no_process(
    local_ray: None, tmp_path: Path
) -> None:
    models = [make_llama(tmp_path / f"model{seed}", seed=seed) for seed in range(2)]
    config = RolloutConfig(
        tensor_parallel=2, dtype="float32", max_model_len=512, kv_cache_memory_bytes=64 << 20, cpus_per_rank=0.5
    )

    async def life() -> None:
        [replica] = await start_replicas(config, models[0])
        try:
            assert replica.subscriber_names() == ["rollout-0/0", "rollout-0/1"]
            trainer = OneRankTrainer(models[0])
            await replica.connect(trainer.address, trainer.backend)
            await trainer.connect([replica])
            flying = asyncio.create_task(replica.generate("flying", [1, 2, 3], 500, greedy=True))
            while (await replica.stats()).tokens < 20:
                assert not flying.done(), flying
                await asyncio.sleep(0.01)
            await trainer.sync(models[1])
            check_switch(await flying, [1, 2, 3], *models)
            fresh = await replica.generate("fresh", [1, 2, 3], 16, greedy=True, prompt_logprobs=0)
            assert fresh.token_ids == greedy_tokens(models[1], [1, 2, 3], 16)
            assert fresh.prompt_logprobs is not None
            assert len(fresh.prompt_logprobs) == 3
            with pytest.raises(ConfigError, match="versions are weights"):
                await replica.announce(2, AdapterConfig(rank=1, alpha=1.0), keep=[1])
            stats = await replica.stats()
            assert (stats.version, stats.commits, stats.requests, stats.tokens) == (1, 1, 2, 516)
            await replica.quarantine(StorageError("the disk is full.", part="disk"))
            with pytest.raises(QuarantinedError, match="disk is full"):
                await replica.generate("refused", [1, 2, 3], 16)
            with pytest.raises(QuarantinedError, match="disk is full"):
                await replica.rollback(1)
            await trainer.sync(models[0])
            assert (await replica.stats()).serving
            trainer.close()
            await kill_it(replica)
        finally:
            await replica.close()

    asyncio.run(asyncio.wait_for(life(), HANG_S))


async def kill_it(replica: RolloutReplica) -> None:
    assert replica.pid is not None
    children = psutil.Process(replica.pid).children(recursive=True)
    assert len(children) >= 3, "an engine core and two ranks"
    segments = segments_of_trees([replica.pid])
    assert segments
    flying = asyncio.create_task(replica.generate("flying", [1, 2, 3], 400))
    while (await replica.stats()).in_flight == 0:  # noqa: ASYNC110 - it tells nobody
        await asyncio.sleep(0.01)
    os.kill(replica.pid, signal.SIGKILL)
    with pytest.raises(WorkerDiedError, match=rf"rollout-0 \(process {replica.pid}\) died"):
        await flying
    await asyncio.to_thread(wait_until_gone, children)
    assert not [segment for segment in segments if segment.exists()]
