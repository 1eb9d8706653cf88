"""Versions that are adapters, from trainer ranks to vLLM's slots: bit for bit, and a request keeps the one that it began with."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from publishing import OneRankTrainer
from running_worker import PROMPT, RecordingWorker, probed_worker, started
from safetensors.torch import load_file
from tiny_models import add_tokenizer, greedy_tokens, is_greedy, load_tensors, make_blocky_qwen3, make_qwen3
from trainer_ranks import Trainers

from weightlane.ckpt_engines import (
    CommitError,
    ManifestError,
    QuarantinedError,
    SyncAbortedError,
    UntouchedError,
)
from weightlane.rollout import Completion
from weightlane.sync import ReplicaState

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

VOCAB = 300
RANK, ALPHA = 4, 6.0
ADAPTER = {"rank": RANK, "alpha": ALPHA}
SOME = ("q_proj", "v_proj", "up_proj")
"""Some of the layers that vLLM fuses with others, which have no adapter."""
EVERY = 3


@pytest.fixture(scope="module")
def trainers() -> Iterator[Trainers]:
    with closing(Trainers(2)) as ranks:
        yield ranks


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = make_qwen3(tmp_path_factory.mktemp("base") / "model", seed=3, vocab=VOCAB)
    add_tokenizer(path, VOCAB)
    return path


def worker_of(model: Path, world: int = 1, **settings: Any) -> RecordingWorker:
    adapter = {**ADAPTER, **settings.pop("adapter", {})}
    return probed_worker(
        settings.pop("name", f"rollout-{world}"),
        model,
        in_engine=world == 1,
        tensor_parallel=world,
        adapter=adapter,
        **{"dtype": "float32", **settings},
    )


class Folder:
    """The versions of a trainer's adapter, as files: merged into the model, and as PEFT saves adapters."""

    def __init__(self, trainers: Trainers, path: Path) -> None:
        self._trainers, self._path = trainers, path

    def merged(self, version: int) -> Path:
        return self._path / f"merged-{version}"

    def peft(self, version: int) -> Path:
        return self._path / f"peft-{version}"

    def make(self, version: int) -> None:
        """Change one element in three of the adapter, and publish that."""
        self._trainers.call("nudge", version, EVERY)
        self._trainers.call("export", str(self.merged(version)))
        self._trainers.call("export_adapter", str(self.peft(version)))
        self._trainers.call("publish", version)


async def probe(worker: RecordingWorker, method: str, *arguments: object) -> list[Any]:
    answers: list[Any] = await worker._engine.running.collective_rpc(method, args=arguments)
    return answers


async def slot(worker: RecordingWorker) -> list[Any]:
    """The slot of the version that serves, on every rank."""
    assert worker._adapters is not None
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
        assert completion.token_ids == greedy_tokens(folder.merged(version), PROMPT, 16)


@pytest.mark.parametrize(
    ("layout", "targets", "dtype"),
    [
        ({"fsdp2": {"tensor_parallel": 2}}, (), "float32"),
        pytest.param({}, SOME, "bfloat16", marks=pytest.mark.exhaustive),
        pytest.param(
            {"engine": "megatron", "megatron": {"tensor_parallel": 2, "sequence_parallel": True}},
            (),
            "float32",
            marks=[pytest.mark.megatron, pytest.mark.exhaustive],
        ),
        pytest.param(
            {"engine": "megatron", "megatron": {"pipeline_parallel": 2}},
            SOME,
            "float32",
            marks=[pytest.mark.megatron, pytest.mark.exhaustive],
        ),
    ],
    ids=["fsdp2-tp2", "fsdp2, some layers, bfloat16", "megatron-tp2", "megatron-pp2, some layers"],
)
def test_a_version_is_in_every_slot_what_vllm_loads_from_pefts_files_and_decodes_as_the_merged_weights(
    trainers: Trainers, model: Path, tmp_path: Path, layout: dict[str, Any], targets: tuple[str, ...], dtype: str
) -> None:
    """Over every engine and codec, in replicas of one rank and of two at once."""
    lora = {**ADAPTER, "targets": targets, "publish": "adapter"}
    trainers.call("setup", str(model), {"lora": lora, **layout})
    folder = Folder(trainers, tmp_path)
    workers = [worker_of(model, world, adapter={"targets": targets}, dtype=dtype) for world in (1, 2)]

    async def publish_all() -> None:
        version = 0
        for engine, codec in (("gloo", "dense"), ("shm", "delta"), ("filesystem", "delta")):
            async with trainers.publishing(workers, engine, tmp_path / "store", dtype, codec=codec) as coordinator:
                for _ in range(2):
                    version += 1
                    folder.make(version)
                    report = await coordinator.sync(version)
                    for worker in workers:
                        await check(worker, folder, version, tokens=dtype == "float32")
                assert report.codec == codec, report.codec_reason

    with started(*workers) as runner:
        runner.run(publish_all())


def test_before_the_first_version_requests_are_refused_then_few_bytes_travel_and_a_rollback_leaves_requests_in_flight(
    trainers: Trainers, tmp_path: Path
) -> None:
    model = make_blocky_qwen3(tmp_path / "model", seed=3)
    add_tokenizer(model)
    everything = sum(4 * tensor.numel() for tensor in load_tensors(model).values())
    trainers.call("setup", str(model), {"lora": {**ADAPTER, "publish": "adapter"}})
    folder, worker = Folder(trainers, tmp_path), worker_of(model)

    async def begin() -> None:
        async with trainers.publishing([worker], "shm") as coordinator:
            assert not worker.stats().serving
            with pytest.raises(QuarantinedError, match=r"no version of the adapter.*trainer\.lora\.publish"):
                await worker.generate("r", PROMPT, 4)
            folder.make(1)
            report = await coordinator.sync(1)
            print(f"{report.sent_bytes} of {everything} bytes: {report.sent_bytes / everything:.1%}")
            assert 0 < report.sent_bytes < 0.05 * everything
            assert worker.stats().serving
            await check(worker, folder, 1)
            with pytest.raises(CommitError, match="no adapter was committed before"):
                await worker.rollback(1)
            folder.make(2)
            await coordinator.sync(2)
            flying = asyncio.create_task(worker.generate("r", PROMPT, 900, greedy=True))
            while worker.clock.in_flight == 0 or worker.clock.tokens < 40:
                assert not flying.done()
                await asyncio.sleep(0.002)
            await worker.rollback(2)
            await check(worker, folder, 1)
            flown = await flying
            assert set(flown.versions) == {2}
            assert is_greedy(folder.merged(2), PROMPT, flown.token_ids)

    with started(worker) as runner:
        runner.run(begin())


def test_requests_keep_their_version_to_the_end_and_those_of_a_third_one_wait_for_a_slot(
    trainers: Trainers, model: Path, tmp_path: Path
) -> None:
    """All with the same prompt, so that a cached block of another version would show."""
    trainers.call("setup", str(model), {"lora": {**ADAPTER, "publish": "adapter"}})
    folder, worker = Folder(trainers, tmp_path), worker_of(model)
    prompt = [(7 * position) % 290 for position in range(100)]

    async def overlap() -> None:
        async with trainers.publishing([worker], "shm") as coordinator:
            flying: list[asyncio.Task[Completion]] = []
            for version in (1, 2, 3):
                folder.make(version)
                await coordinator.sync(version)
                flying += [
                    asyncio.create_task(worker.generate("r", prompt, count, greedy=True)) for count in (900, 850)
                ]
                wanted = worker.clock.tokens + 20
                while worker.clock.tokens < wanted:
                    assert not [each.exception() for each in flying if each.done()]
                    await asyncio.sleep(0.002)
            assert len(set(worker._in_flight.values())) == 3, "requests of three versions at once"
            assert await probe(worker, "probe_adapters") == [sorted(set(worker._in_flight.values()))]
            for number, each in enumerate(flying):
                completion = await each
                version = number // 2 + 1
                assert set(completion.versions) == {version}
                assert is_greedy(folder.merged(version), prompt, completion.token_ids), f"version {version}"
                for other in {1, 2, 3} - {version}:
                    assert not is_greedy(folder.merged(other), prompt, completion.token_ids)
            folder.make(4)
            await coordinator.sync(4)
            assert worker._adapters is not None
            newest = worker._adapters.current().id
            assert await probe(worker, "probe_adapters") == [[newest - 1, newest]], "and the one before, for a rollback"

    with started(worker) as runner:
        runner.run(overlap())


def test_a_rank_that_cannot_take_a_version_leaves_the_one_before_in_service_bit_for_bit(
    trainers: Trainers, model: Path, tmp_path: Path
) -> None:
    trainers.call("setup", str(model), {"lora": {**ADAPTER, "publish": "adapter"}})
    folder, worker = Folder(trainers, tmp_path), worker_of(model, 2)

    async def fail() -> None:
        async with trainers.publishing([worker], "shm") as coordinator:
            folder.make(1)
            await coordinator.sync(1)
            before = await slot(worker)
            for rank, version in ((0, 2), (1, 3)):
                flying = asyncio.create_task(worker.generate("r", PROMPT, 200, greedy=True))
                kept = await probe(worker, "probe_adapters")
                await probe(worker, "probe_fail_adapter", rank)
                folder.make(version)
                with pytest.raises(SyncAbortedError, match=rf"rollout rank {rank}.*on purpose") as raised:
                    await coordinator.sync(version)
                assert type(raised.value.reason) is UntouchedError
                assert coordinator.states() == {"rollout-2": ReplicaState.SERVING}
                assert await slot(worker) == before
                assert await probe(worker, "probe_adapters") == kept
                await check(worker, folder, 1)
                assert is_greedy(folder.merged(1), PROMPT, (await flying).token_ids)
            folder.make(4)
            await coordinator.sync(4)
            await check(worker, folder, 4)

    with started(worker) as runner:
        runner.run(fail())


def test_a_version_with_other_names_or_shapes_is_refused_by_name_before_it_is_sent_and_weights_are_refused(
    trainers: Trainers, model: Path, tmp_path: Path
) -> None:
    trainers.call("setup", str(model), {"lora": {**ADAPTER, "publish": "adapter"}})
    trainers.call("export_adapter", str(tmp_path / "peft"))
    tensors = load_file(tmp_path / "peft" / "adapter_model.safetensors")
    first, *others = tensors
    strange = "base_model.model.model.layers.9.self_attn.q_proj.lora_A.weight"
    wrong: list[tuple[dict[str, torch.Tensor], str]] = [
        ({name: tensors[name] for name in others}, rf"missing {first}"),
        ({**tensors, strange: torch.zeros(RANK, 64)}, rf"unexpected {strange}"),
        ({**tensors, first: tensors[first].T.contiguous()}, rf"{first} has shape"),
        (load_tensors(model), "missing base_model"),
    ]
    worker = worker_of(model)

    async def refuse(sent: dict[str, torch.Tensor], says: str) -> None:
        with closing(OneRankTrainer(sent)) as trainer:
            await worker.connect(trainer.address, "shm")
            await trainer.connect([worker], retries=0)
            with pytest.raises(SyncAbortedError, match=says) as raised:
                await trainer.sync_live()
            assert isinstance(raised.value.reason, ManifestError)

    with started(worker) as runner:
        for sent, says in wrong:
            runner.run(refuse(sent, says))


def test_a_replica_in_the_place_of_one_that_ended_gets_the_newest_version_from_a_second_sync(
    trainers: Trainers, model: Path, tmp_path: Path
) -> None:
    trainers.call("setup", str(model), {"lora": {**ADAPTER, "publish": "adapter"}})
    folder = Folder(trainers, tmp_path)
    stays, ends, newcomer = (worker_of(model, name=f"rollout-{number}") for number in range(3))

    async def replace() -> None:
        async with trainers.publishing([stays, ends], "shm") as coordinator:
            for version in (1, 2):
                folder.make(version)
                await coordinator.sync(version)
            await check(ends, folder, 2)
            before = await slot(stays)
            await ends.close()
            coordinator.remove(ends.name)
            await newcomer.connect(coordinator._rendezvous.address.to_plain(), "shm")
            coordinator.add(newcomer)
            await coordinator.sync(2)
            assert await slot(stays) == before
            for worker in (stays, newcomer):
                await check(worker, folder, 2)
            folder.make(3)
            await coordinator.sync(3)
            for worker in (stays, newcomer):
                await check(worker, folder, 3)

    with started(stays, ends, newcomer) as runner:
        runner.run(replace())
