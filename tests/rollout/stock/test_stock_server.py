"""Without our loop: the torchrun example publishes to vLLM OpenAI servers that know nothing of weightlane but its plugin."""

from __future__ import annotations

import asyncio
import json
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
from json_program import Program
from ports import free_port
from publishing import OneRankTrainer, served_by
from stock_server import StockServer
from tiny_models import add_tokenizer, greedy_tokens, make_qwen3
from waiting import HANG_S, wait_until

from weightlane.ckpt_engines import CommitError, ReplicaTakenError, SyncAbortedError, WeightlaneError
from weightlane.cli.config.worker_config import RolloutsSection
from weightlane.cli.run.version_publishing import VersionPublishing
from weightlane.rollout import ServerReplica
from weightlane.rollout.conformance.publishing import RefusingReplica
from weightlane.rollout.contract.named_segments import segments_of_trees, unlink
from weightlane.sync import CheckpointEngineConfig, SyncConfig
from weightlane.trainer import TokenBatch, TokenSequence, TrainerConfig
from weightlane.trainer.algorithms.roles import POLICY
from weightlane.trainer.dispatch.dispatch import WorkerDispatch
from weightlane.trainer.dispatch.ranks import LocalRanks
from weightlane.trainer.dispatch.role_spec import RoleSpec
from weightlane.trainer.runner.job_queue.job_queue import JobQueue
from weightlane.trainer.runner.job_worker import JobWorker
from weightlane.trainer.runner.jobs import Export, Publish, SftStep
from weightlane.trainer.runner.runner import Runner

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

EXAMPLE = Path(__file__).resolve().parents[3] / "examples" / "torchrun" / "train_and_publish.py"
HTTP_TRAINER = Path(__file__).with_name("http_trainer.py")
NCCL_PROGRAM = Path(__file__).with_name("nccl_program.py")
PROMPT = [5, 6, 7]
LONG = 1000
"""Tokens that take longer than whatever happens while they are decoded."""


@pytest.fixture(scope="module")
def server(session_children: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[StockServer]:
    """One server for all tests, of two ranks: nothing but its own endpoints tells it that trainers come and go."""
    folder = tmp_path_factory.mktemp("stock")
    model = make_qwen3(folder / "model", seed=0, tied=True)
    add_tokenizer(model)
    started = StockServer(session_children, model, free_port(), 2, folder / "server.log")
    started.wait_ready()
    started.fresh = started.checksums()
    yield started
    segments = segments_of_trees([started.process.pid])
    started.process.terminate()
    started.process.wait(HANG_S)
    unlink(segments)  # vLLM leaves those between its ranks behind


def start_example(server: StockServer, children: Any, log: Path, **more: object) -> list[subprocess.Popen[str]]:
    """Start two ranks of the example with these options, as ``torchrun`` starts them."""
    given = {"model": server.model, "server": server.url, "tensor_parallel": server.tensor_parallel, **more}
    options = [str(part) for name, value in given.items() for part in (f"--{name.replace('_', '-')}", value)]
    meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "2"}
    with log.open("w") as file:
        return [
            children.start(
                [str(EXAMPLE), *options],
                forked=True,
                env={**meeting, "RANK": rank, "LOCAL_RANK": rank, "GLOO_SOCKET_IFNAME": "lo"},
                stdout=file,
                stderr=subprocess.STDOUT,
            )
            for rank in "01"
        ]


def test_the_example_is_as_short_as_promised_and_needs_no_ray_and_no_vllm() -> None:
    lines = EXAMPLE.read_text().splitlines()
    assert len(lines) < 60
    assert not [line for line in lines if line.startswith(("import", "from")) and ("ray" in line or "vllm" in line)]


def test_a_plain_torchrun_script_publishes_to_a_stock_server_also_after_one_that_was_killed_in_the_middle_of_a_version(
    server: StockServer, children: Any, tmp_path: Path
) -> None:
    before, tokens, version = server.checksums(), server.greedy(PROMPT), server.version()
    for call in ("update_weights", "finish_weight_update"):  # out of order: every rank refuses, every answer is read
        assert server.ask("POST", f"/{call}", {"update_info": {"version": 7}})[0] != 200
    assert server.checksums() == before
    log, store, trained = tmp_path / "example.log", tmp_path / "half", tmp_path / "trained"
    # A bucket per tensor, each of which has to reach the disk.
    slow = {"options": json.dumps({"path": str(store), "fsync": True}), "sync": json.dumps({"bucket_mib": 0.001})}
    ranks = start_example(server, children, log, engine="filesystem", **slow)

    def under_way() -> bool:
        assert all(rank.poll() is None for rank in ranks), log.read_text()
        return len(list(store.rglob("bucket-*"))) > 2

    wait_until(under_way, "bucket of the version", poll_s=0.02)
    for rank in ranks:
        rank.kill()
        rank.wait()
    assert server.greedy(PROMPT) == tokens
    assert (server.checksums(), server.version()) == (before, version)

    for rank in start_example(server, children, log, engine="gloo", steps=2, out=trained):
        assert rank.wait(HANG_S) == 0, log.read_text()
    assert server.version() == "2"
    wanted = greedy_tokens(trained, PROMPT, 16)
    assert server.greedy(PROMPT) == wanted
    assert wanted != tokens


async def unfinished(server: StockServer) -> dict[str, Any]:
    """Send requests, one after the other, until one does not end by itself: a busy server is slow to pause."""
    while (done := await asyncio.to_thread(server.complete, PROMPT, LONG))["finish_reason"] == "length":
        pass
    return done


def test_the_coordinator_commits_and_takes_back_and_quarantines_over_http(server: StockServer, tmp_path: Path) -> None:
    first, second = (make_qwen3(tmp_path / f"model{seed}", seed=seed, tied=True) for seed in (1, 2))

    async def greedy() -> list[int]:
        return await asyncio.to_thread(server.greedy, PROMPT)

    async def life() -> None:
        replica = ServerReplica(server.url, tensor_parallel=2, commit_timeout_s=HANG_S)
        trainer = OneRankTrainer(server.model)
        await replica.connect(trainer.address, trainer.backend, {})
        other = RefusingReplica("picky", trainer)
        await trainer.connect([replica, other], quorum=1.0)
        assert (await trainer.sync(first)).replicas[replica.name].outcome == "committed"
        # A client of vLLM's four calls that died between two of them.
        for path in ("/pause?mode=keep", "/start_weight_update"):
            assert server.ask("POST", path, {})[0] == 200
        await trainer.sync(second)
        assert await greedy() == greedy_tokens(second, PROMPT, 16)

        with pytest.raises(WeightlaneError, match="version 777 is not staged"):
            await replica.commit(777)
        assert replica.serving
        assert await greedy() == greedy_tokens(second, PROMPT, 16), "it was resumed with what it had"

        with pytest.raises(CommitError, match="not kept"):
            await replica.rollback(2)  # everybody serves it
        other.before_refusal = served_by(replica)
        with pytest.raises(SyncAbortedError, match="not for this replica"):
            await trainer.sync(first)
        assert (replica.version, server.version()) == (2, "2")
        assert await greedy() == greedy_tokens(second, PROMPT, 16), "it was taken back"
        other.before_refusal = None

        flying = asyncio.create_task(unfinished(server))
        while not server.running():  # noqa: ASYNC110 - only its metrics tell
            await asyncio.sleep(0.01)
        await replica.quarantine(WeightlaneError("told to"))
        assert not replica.serving
        assert (await flying)["finish_reason"] == "abort"
        waiting = asyncio.create_task(greedy())
        await asyncio.sleep(0.2)
        if refused := waiting.done():  # vLLM 0.33 keeps no request waiting
            with pytest.raises(AssertionError, match=r"Please retry after it resumes.*503"):
                await waiting
        await trainer.sync(first)
        assert replica.serving
        assert await (greedy() if refused else waiting) == greedy_tokens(first, PROMPT, 16)
        trainer.close()
        other.close()

    asyncio.run(asyncio.wait_for(life(), HANG_S))


@pytest.mark.exhaustive
def test_a_worker_publishes_to_a_server_what_it_exports(server: StockServer, tmp_path: Path) -> None:
    jobs = JobQueue(tmp_path / "jobs")
    batch = TokenBatch((TokenSequence.of_completion([5, 6], [7, 9]),))
    names = [jobs.submit(job) for job in (SftStep(batch), Publish(9), Export(tmp_path / "model", "float32"))]

    async def life() -> None:
        spec = RoleSpec(POLICY, TrainerConfig(device="cpu", learning_rate=1e-2), server.model, {})
        dispatch = WorkerDispatch([spec], {"trainer": LocalRanks(HANG_S)})
        await dispatch.start()
        rollouts = RolloutsSection(servers=(server.url,), tensor_parallel=2)
        sync = SyncConfig(deadline_s=HANG_S, connect_timeout_s=HANG_S)
        publishing = VersionPublishing(dispatch[POLICY], CheckpointEngineConfig(), sync, rollouts, "float32")
        await publishing.connect()
        assert jobs.take_turn() is not None
        worker = JobWorker(jobs, Runner(dispatch), publishing.publish)
        assert await worker.run(asyncio.Event(), until_empty=True) == len(names)
        publishing.close()
        await dispatch.close()

    before = server.greedy(PROMPT)
    asyncio.run(asyncio.wait_for(life(), HANG_S))
    assert all(jobs.finished(name) for name in names)
    assert server.version() == "9"
    assert before != server.greedy(PROMPT) == greedy_tokens(tmp_path / "model", PROMPT, 16)


@pytest.mark.exhaustive
def test_a_program_for_vllms_nccl_backend_needs_another_name_only(
    server: StockServer, children: Any, tmp_path: Path
) -> None:
    other, program = make_qwen3(tmp_path / "model", seed=6, tied=True), tmp_path / "program.py"
    text = NCCL_PROGRAM.read_text().replace(
        "vllm.distributed.weight_transfer.nccl_engine", "weightlane.rollout.vllm_trainer"
    )
    program.write_text(text.replace("NCCLTrainerInitInfo", "WeightlaneTrainerInitInfo"))
    for models in ([server.model, other], [other, server.model]):
        arguments = [str(program), server.url, *map(str, models)]
        status, _, errors = children.run(arguments, forked=True)
        assert status == 0, errors
        assert server.version() == "2"
        assert server.greedy(PROMPT) == greedy_tokens(models[-1], PROMPT, 16)
        assert (server.checksums() == server.fresh) == (models[-1] == server.model)


@pytest.mark.exhaustive
def test_two_servers_get_every_version_or_none_also_when_a_trainer_or_a_server_is_killed(
    session_children: Any, tmp_path: Path
) -> None:
    """Nothing is left behind, but for the shared memory and the engine of the killed server, which vLLM leaves."""
    models = [make_qwen3(tmp_path / f"model{seed}", seed=seed, tied=True) for seed in range(3)]
    add_tokenizer(models[0])
    servers = [
        StockServer(session_children, models[0], free_port(), 1, tmp_path / f"server{number}.log")
        for number in range(2)
    ]
    for each in servers:
        each.wait_ready()
    shared, urls = set(Path("/dev/shm").iterdir()), [each.url for each in servers]

    def trainer(**settings: object) -> Program:
        started = Program(HTTP_TRAINER)
        started.call("connect", str(models[0]), urls, settings)
        return started

    def all_serve(model: Path, version: str, some: Sequence[StockServer] = servers) -> None:
        for each in some:
            assert each.version() == version
            assert each.greedy(PROMPT) == greedy_tokens(model, PROMPT, 16)

    store = tmp_path / "versions"
    first = trainer(engine="filesystem", options={"path": str(store), "fsync": True}, sync={"bucket_mib": 0.001})
    assert first.call("send", str(models[1])) == ""
    all_serve(models[1], "1")
    begun = len(list(store.rglob("bucket-*")))
    first.ask("send", str(models[2]))
    wait_until(lambda: len(list(store.rglob("bucket-*"))) > begun + 2, "bucket of the version", poll_s=0.01)
    first.kill()
    all_serve(models[1], "1")

    second = trainer()
    assert second.call("send", str(models[2])) == ""
    all_serve(models[2], "1")
    segments = segments_of_trees([servers[1].process.pid])
    engines = psutil.Process(servers[1].process.pid).children(recursive=True)
    servers[1].process.kill()
    servers[1].process.wait(HANG_S)
    error = second.call("send", str(models[1]))
    assert error.startswith("SyncAbortedError"), error
    assert str(servers[1].port) in error
    all_serve(models[2], "1", servers[:1])
    second.kill()
    for each in engines:
        with suppress(psutil.NoSuchProcess):  # it may notice its parent's death first
            each.kill()
    unlink(segments)
    left = set(Path("/dev/shm").iterdir()) - shared
    left -= segments_of_trees(psutil.pids())  # of tests that run meanwhile
    assert [path for path in left if path.exists()] == []
    third = Program(HTTP_TRAINER)
    third.call("connect", str(models[0]), urls[:1], {})
    assert third.call("send", str(models[1])) == ""
    all_serve(models[1], "1", servers[:1])
    third.call("close")
    third.kill()
    servers[0].process.terminate()
    servers[0].process.wait(HANG_S)


def test_a_server_has_one_publisher(server: StockServer, tmp_path: Path) -> None:
    """A second is refused while the first lives, unless it takes the server over; then the first is, and takes nothing back."""
    weights = [make_qwen3(tmp_path / f"model{seed}", seed=seed, tied=True) for seed in (3, 4, 5)]

    async def life() -> None:
        def replica(**more: bool) -> ServerReplica:
            return ServerReplica(server.url, tensor_parallel=2, commit_timeout_s=HANG_S, **more)

        async def served(trainer: OneRankTrainer, model: Path) -> None:
            await trainer.sync(model)
            assert await asyncio.to_thread(server.greedy, PROMPT) == greedy_tokens(model, PROMPT, 16)

        first, second = (OneRankTrainer(server.model) for _ in range(2))
        mine, refused, taking = replica(), replica(), replica(take_over=True)
        await mine.connect(first.address, first.backend, {})
        await first.connect([mine])
        with pytest.raises(ReplicaTakenError, match=r"follows another publisher, at 127\.0\.0\.1:\d+, which lives"):
            await refused.connect(second.address, second.backend, {})
        await served(first, weights[0])
        await mine.connect(first.address, first.backend, {})  # its own connection may be made again
        await taking.connect(second.address, second.backend, {})
        await second.connect([taking])
        await served(second, weights[1])
        for _ in range(2):
            with pytest.raises(ReplicaTakenError):
                await mine.connect(first.address, first.backend, {})
        await served(second, weights[2])
        second.close()
        await mine.connect(first.address, first.backend, {})
        first.close()

    asyncio.run(asyncio.wait_for(life(), HANG_S))
