"""Versions that are adapters, from trainer ranks to vLLM's slots on two ranks, bit for bit; a failed one changes nothing."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from named_adapters import ALPHA, RANK, NamedAdapters
from running_replica import PROMPT, slow_steps
from safetensors.torch import load_file
from tiny_models import is_greedy
from trainer_ranks import Trainers

from weightlane.ckpt_engines import SyncAbortedError, UntouchedError
from weightlane.sync import ReplicaState

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

LORA = {"rank": RANK, "alpha": ALPHA, "publish": "adapter"}
EVERY = 9
LAYOUTS = {
    "fsdp2-tp2": {"fsdp2": {"tensor_parallel": 2}},
    "megatron-tp2": {"engine": "megatron", "megatron": {"tensor_parallel": 2, "sequence_parallel": True}},
}


@pytest.fixture(scope="module")
def trainers() -> Iterator[Trainers]:
    with closing(Trainers(2)) as ranks:
        yield ranks


class Folder:
    """The versions of a trainer's adapter, as files: merged into the model, and as PEFT saves adapters."""

    def __init__(self, trainers: Trainers, path: Path, newest: int) -> None:
        self._trainers, self._path, self._newest = trainers, path, newest

    def merged(self, version: int) -> Path:
        return self._path / f"merged-{version}"

    def peft(self, version: int) -> Path:
        return self._path / f"peft-{version}"

    def make(self) -> int:
        """Change one element in nine of the adapter, and publish that; returns its version."""
        self._newest += 1
        self._trainers.call("nudge", self._newest, EVERY)
        self._trainers.call("export", str(self.merged(self._newest)))
        self._trainers.call("export_adapter", str(self.peft(self._newest)))
        self._trainers.call("publish", self._newest)
        return self._newest

    async def check_served(self, replica: NamedAdapters, version: int) -> None:
        """New requests compute with a version, which is in the slots bit for bit what vLLM loads from PEFT's files."""
        assert replica.local.version == version
        await replica.check_slot(self.peft(version))
        completion = await replica.local.generate("fresh", PROMPT, 16, greedy=True)
        assert completion.versions == [version] * 16
        assert is_greedy(self.merged(version), PROMPT, completion.token_ids)


@pytest.mark.parametrize(
    "layout", ["fsdp2-tp2", pytest.param("megatron-tp2", marks=[pytest.mark.megatron, pytest.mark.exhaustive])]
)
def test_a_version_is_in_every_slot_what_vllm_loads_from_pefts_files_and_decodes_as_the_merged_weights(
    trainers: Trainers, fresh_adapters: tuple[NamedAdapters, Any], tmp_path: Path, layout: str
) -> None:
    """Over every engine and codec; and no weight of the model is sent."""
    replica, _ = fresh_adapters
    trainers.call("setup", str(replica.model), {"lora": LORA, **LAYOUTS[layout]})
    folder = Folder(trainers, tmp_path, replica.newest)

    async def publish_all() -> None:
        for engine, codec in (("gloo", "dense"), ("filesystem", "delta")):
            async with trainers.publishing([replica.local], engine, tmp_path / "store", codec=codec) as coordinator:
                for _ in range(1 if codec == "dense" else 2):
                    version = folder.make()
                    report = await coordinator.sync(version)
                    await folder.check_served(replica, version)
                assert report.codec == codec, report.codec_reason
            if codec == "dense":
                adapter = load_file(folder.peft(version) / "adapter_model.safetensors").values()
                assert 0 < report.sent_bytes <= 2 * sum(tensor.nbytes for tensor in adapter), "to two ranks"

    replica.run(publish_all())


def test_a_rank_that_cannot_take_a_version_leaves_the_one_before_in_service_bit_for_bit(
    trainers: Trainers, fresh_adapters: tuple[NamedAdapters, Any], tmp_path: Path
) -> None:
    replica, _ = fresh_adapters
    trainers.call("setup", str(replica.model), {"lora": LORA})
    worker, folder = replica.local, Folder(trainers, tmp_path, replica.newest)

    async def fail() -> None:
        async with trainers.publishing([worker], "shm") as coordinator:
            served = folder.make()
            await coordinator.sync(served)
            kept = await replica.loaded()
            await replica.probe("probe_fail_adapter", 1)
            version = folder.make()
            async with slow_steps(worker):
                flying = asyncio.create_task(worker.generate("r", PROMPT, 60, greedy=True))
                with pytest.raises(SyncAbortedError, match=r"rollout rank 1.*on purpose") as raised:
                    await coordinator.sync(version)
            assert type(raised.value.reason) is UntouchedError
            assert coordinator.states() == {worker.name: ReplicaState.SERVING}
            assert await replica.loaded() == kept
            await folder.check_served(replica, served)
            assert is_greedy(folder.merged(served), PROMPT, (await flying).token_ids)
            version = folder.make()
            await coordinator.sync(version)
            await folder.check_served(replica, version)

    replica.run(fail())
