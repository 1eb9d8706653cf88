"""Versions that are adapters, from trainer ranks to vLLM's slots on two ranks, bit for bit; a failed one changes nothing."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
from running_worker import PROMPT, RecordingWorker, probed_worker, slow_steps, started
from safetensors.torch import load_file
from tiny_models import add_tokenizer, is_greedy, make_qwen3
from trainer_ranks import Trainers
from waiting import HANG_S

from weightlane.ckpt_engines import SyncAbortedError, UntouchedError
from weightlane.sync import ReplicaState

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

VOCAB = 300
RANK, ALPHA = 4, 6.0
ADAPTER = {"rank": RANK, "alpha": ALPHA}
LORA = {**ADAPTER, "publish": "adapter"}
SOME = ("q_proj", "v_proj", "up_proj")
"""Some of the layers that vLLM fuses with others, which have no adapter."""
EVERY = 3
MEGATRON_TP2 = {"engine": "megatron", "megatron": {"tensor_parallel": 2, "sequence_parallel": True}}
MEGATRON_PP2 = {"engine": "megatron", "megatron": {"pipeline_parallel": 2}}


@pytest.fixture(scope="module")
def trainers() -> Iterator[Trainers]:
    with closing(Trainers(2)) as ranks:
        yield ranks


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = make_qwen3(tmp_path_factory.mktemp("base") / "model", seed=3, vocab=VOCAB)
    add_tokenizer(path, VOCAB)
    return path


class Replica:
    """A running replica of two ranks that takes the adapters which trainer ranks publish."""

    def __init__(self, runner: asyncio.Runner, worker: RecordingWorker) -> None:
        self._runner, self.worker = runner, worker

    def run(self, call: Coroutine[Any, Any, None]) -> None:
        self._runner.run(asyncio.wait_for(call, HANG_S))


@contextmanager
def serving(model: Path, targets: tuple[str, ...] = (), dtype: str = "float32") -> Iterator[Replica]:
    adapter = {**ADAPTER, "targets": targets}
    worker = probed_worker("rollout-0", model, tensor_parallel=2, adapter=adapter, dtype=dtype)
    with started(worker) as runner:
        yield Replica(runner, worker)


@pytest.fixture(scope="module")
def replica(model: Path) -> Iterator[Replica]:
    with serving(model) as started_one:
        yield started_one


class Folder:
    """The versions of a trainer's adapter, as files: merged into the model, and as PEFT saves adapters."""

    def __init__(self, trainers: Trainers, path: Path, newest: int) -> None:
        self._trainers, self._path, self._newest = trainers, path, newest

    def merged(self, version: int) -> Path:
        return self._path / f"merged-{version}"

    def peft(self, version: int) -> Path:
        return self._path / f"peft-{version}"

    def make(self) -> int:
        """Change one element in three of the adapter, and publish that; returns its version."""
        self._newest += 1
        self._trainers.call("nudge", self._newest, EVERY)
        self._trainers.call("export", str(self.merged(self._newest)))
        self._trainers.call("export_adapter", str(self.peft(self._newest)))
        self._trainers.call("publish", self._newest)
        return self._newest


async def probe(worker: RecordingWorker, method: str, *arguments: object) -> list[Any]:
    answers: list[Any] = await worker._engine.running.collective_rpc(method, args=arguments)
    return answers


async def slot(worker: RecordingWorker) -> list[Any]:
    """The slot of the version that serves, on every rank."""
    return await probe(worker, "probe_slot", worker._adapters.current().id)


async def check(worker: RecordingWorker, folder: Folder, version: int, *, tokens: bool = True) -> None:
    """New requests compute with a version, which is in the slots bit for bit what vLLM loads from PEFT's files."""
    assert worker.version == version
    held = await slot(worker)
    assert held == await probe(worker, "probe_slot_of_files", str(folder.peft(version)))
    assert len(held) == worker.config.tensor_parallel
    assert any(bytes.fromhex(str(raw)).strip(b"\0") for rank in held for _, _, raw in rank.values())
    if tokens:
        completion = await worker.generate("fresh", PROMPT, 16, greedy=True)
        assert completion.versions == [version] * 16
        assert is_greedy(folder.merged(version), PROMPT, completion.token_ids)


@pytest.mark.parametrize(
    "layout",
    [
        {"fsdp2": {"tensor_parallel": 2}},
        pytest.param(MEGATRON_TP2, marks=[pytest.mark.megatron, pytest.mark.exhaustive]),
    ],
    ids=["fsdp2-tp2", "megatron-tp2"],
)
def test_a_version_is_in_every_slot_what_vllm_loads_from_pefts_files_and_decodes_as_the_merged_weights(
    trainers: Trainers, replica: Replica, model: Path, tmp_path: Path, layout: dict[str, Any]
) -> None:
    """Over every engine and codec; and no weight of the model travels."""
    trainers.call("setup", str(model), {"lora": LORA, **layout})
    worker = replica.worker
    folder = Folder(trainers, tmp_path, worker.version)

    async def publish_all() -> None:
        for engine, codec in (("gloo", "dense"), ("shm", "delta"), ("filesystem", "delta")):
            async with trainers.publishing([worker], engine, tmp_path / "store", codec=codec) as coordinator:
                for _ in range(1 if codec == "dense" else 2):
                    version = folder.make()
                    report = await coordinator.sync(version)
                    await check(worker, folder, version)
                assert report.codec == codec, report.codec_reason
            if codec == "dense":
                adapter = load_file(folder.peft(version) / "adapter_model.safetensors").values()
                assert 0 < report.sent_bytes <= 2 * sum(tensor.nbytes for tensor in adapter), "to two ranks"

    replica.run(publish_all())


@pytest.mark.megatron
@pytest.mark.exhaustive
def test_an_adapter_of_some_layers_in_half_precision_is_in_the_slots_what_vllm_loads(
    trainers: Trainers, model: Path, tmp_path: Path
) -> None:
    trainers.call("setup", str(model), {"lora": {**LORA, "targets": SOME}, **MEGATRON_PP2})
    folder = Folder(trainers, tmp_path, 0)
    with serving(model, SOME, "bfloat16") as replica:

        async def publish() -> None:
            async with trainers.publishing([replica.worker], "shm", dtype="bfloat16") as coordinator:
                for _ in range(2):
                    version = folder.make()
                    await coordinator.sync(version)
                    await check(replica.worker, folder, version, tokens=False)

        replica.run(publish())


def test_a_rank_that_cannot_take_a_version_leaves_the_one_before_in_service_bit_for_bit(
    trainers: Trainers, replica: Replica, model: Path, tmp_path: Path
) -> None:
    trainers.call("setup", str(model), {"lora": LORA})
    worker = replica.worker
    folder = Folder(trainers, tmp_path, worker.version)

    async def fail() -> None:
        async with trainers.publishing([worker], "shm") as coordinator:
            served = folder.make()
            await coordinator.sync(served)
            before = await slot(worker)
            for rank in range(2):
                kept = await probe(worker, "probe_adapters")
                await probe(worker, "probe_fail_adapter", rank)
                version = folder.make()
                async with slow_steps(worker):
                    flying = asyncio.create_task(worker.generate("r", PROMPT, 60, greedy=True))
                    with pytest.raises(SyncAbortedError, match=rf"rollout rank {rank}.*on purpose") as raised:
                        await coordinator.sync(version)
                assert type(raised.value.reason) is UntouchedError
                assert coordinator.states() == {worker.name: ReplicaState.SERVING}
                assert await slot(worker) == before
                assert await probe(worker, "probe_adapters") == kept
                await check(worker, folder, served)
                assert is_greedy(folder.merged(served), PROMPT, (await flying).token_ids)
            version = folder.make()
            await coordinator.sync(version)
            await check(worker, folder, version)

    replica.run(fail())
