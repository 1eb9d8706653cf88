"""The rollout engine `sglang` against a server that behaves as a real one was seen to: see `recorded_server`."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import tempfile
import uuid
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import recorded_server
import torch
from bits import assert_same
from publishing import OneRankTrainer
from recorded_server import RecordedServer
from tiny_models import add_tokenizer, check_switch, greedy_tokens, load_tensors, make_qwen3
from transformers import AutoModelForCausalLM
from waiting import HANG_S, wait_until

from weightlane.ckpt_engines import ConfigError, QuarantinedError, WeightlaneError, WorkerDiedError
from weightlane.rollout import LocalReplica, RolloutConfig
from weightlane.rollout.engines.sglang.engine import SglangEngine
from weightlane.sync import Outcome

PROMPT = [5, 6, 7]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("models")
    made = [make_qwen3(folder / f"model-{seed}", seed=seed) for seed in range(2)]
    add_tokenizer(made[0])
    return made


def replica_of(model: Path, **settings: Any) -> LocalReplica:
    config = RolloutConfig(engine="sglang", dtype="float32", max_model_len=240, start_timeout_s=HANG_S, **settings)
    return LocalReplica("rollout-0", config, model, engine=SglangEngine)


@asynccontextmanager
async def served(
    models: list[Path], *, incremental: bool = True, **settings: Any
) -> AsyncIterator[tuple[RecordedServer, LocalReplica, OneRankTrainer]]:
    """A server that runs already, and a replica of it to which a trainer publishes."""
    server = RecordedServer(models[1], incremental=incremental, token="secret")
    server.paused = True  # another run's weights, and its client has died
    extra = {"server": await server.start(), "api_key": "secret"}
    replica, trainer = replica_of(models[0], extra_engine_args=extra, **settings), OneRankTrainer(models[0])
    try:
        await replica.start()
        await replica.connect(trainer.address, "shm")
        await trainer.connect([replica])
        yield server, replica, trainer
    finally:
        await replica.close()
        trainer.close()
        await server.close()


async def until(reached: Callable[[], bool]) -> None:
    while not reached():  # noqa: ASYNC110 - as `wait_until`; `in_loop` has the deadline
        await asyncio.sleep(0.005)


def in_loop(test: Callable[[], Any]) -> None:
    asyncio.run(asyncio.wait_for(test(), HANG_S))


@pytest.mark.parametrize("incremental", [True, False])
def test_every_token_has_the_version_whose_weights_computed_it(
    models: list[Path], incremental: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))

    async def test() -> None:
        async with served(models, incremental=incremental) as (server, replica, trainer):
            running = asyncio.create_task(replica.generate("r", PROMPT, 60, greedy=True))
            await until(lambda: replica.clock.tokens > 5)
            report = await trainer.sync(models[1])
            completion = await running
            check_switch(completion, PROMPT, *models)
            assert report.replicas["rollout-0"].recomputed_tokens == replica.stats().recomputed_tokens > len(PROMPT) + 5
            again = await replica.generate("r", PROMPT, 5, greedy=True)
            assert (again.token_ids, again.versions) == (greedy_tokens(models[1], PROMPT, 5), [1] * 5)
            assert not list(tmp_path.glob("weightlane-sglang-*")), "versions stay nowhere"
            assert_same(dict(server.model.state_dict()), load_tensors(models[1]))

    in_loop(test)


def test_samples_have_the_log_probabilities_of_the_distribution_that_they_are_drawn_from(models: list[Path]) -> None:
    async def test() -> None:
        async with served(models) as (_, replica, _):
            wide = await replica.generate("r", PROMPT, 8, temperature=0.5, top_logprobs=2, prompt_logprobs=2)
            narrow = await replica.generate("r", PROMPT, 8, temperature=0.5, top_k=3, top_logprobs=2)
            model = AutoModelForCausalLM.from_pretrained(models[0], dtype=torch.float32)
            for found, kept in ((wide, model.config.vocab_size), (narrow, 3)):
                with torch.no_grad():
                    logits = model(torch.tensor([[*PROMPT, *found.token_ids]])).logits[0].float()
                for row, token, logprob, top in zip(
                    logits[2:-1], found.token_ids, found.logprobs, found.top_logprobs or (), strict=True
                ):
                    best = (row / 0.5).topk(kept)
                    wanted = dict(zip(best.indices.tolist(), best.values.log_softmax(-1).tolist(), strict=True))
                    assert logprob == pytest.approx(wanted[token], abs=1e-4)
                    assert top == [(each, pytest.approx(wanted[each], abs=1e-4)) for each in list(wanted)[:2]]
                    assert [each for each, _ in top] == list(wanted)[:2]
                if found is wide:
                    of_prompt = logits[:2].log_softmax(-1)[range(2), PROMPT[1:]].tolist()
                    assert found.prompt_logprobs == [None, *(pytest.approx(each, abs=1e-4) for each in of_prompt)]

    in_loop(test)


def test_a_request_ends_at_its_own_stops_and_leaves_nothing_running(models: list[Path]) -> None:
    async def test() -> None:
        async with served(models) as (server, replica, _):
            whole = await replica.generate("r", PROMPT, 40, temperature=0.5)
            stop = greedy_tokens(models[0], PROMPT, 1)[0]
            by_id = await replica.generate("r", PROMPT, 200, greedy=True, stop_ids=[stop])
            by_text = await replica.generate("r", PROMPT, 200, greedy=True, stop_strings=[f"w{stop}"])
            for found in (by_id, by_text):
                assert (found.token_ids, found.versions, found.finish_reason) == ([stop], [0], "stop")
            assert (len(whole.token_ids), whole.finish_reason) == (40, "length")
            given_up = asyncio.create_task(replica.generate("r", PROMPT, 200))
            await until(lambda: bool(server.requests))
            server.paused = True  # it ends by itself no more
            given_up.cancel()
            await until(lambda: not server.requests)

    in_loop(test)


def test_a_version_that_the_server_does_not_load_leaves_the_old_one_serving(
    models: list[Path], monkeypatch: Any
) -> None:
    async def test() -> None:
        async with served(models) as (server, replica, trainer):
            running = asyncio.create_task(replica.generate("r", PROMPT, 60, greedy=True))
            await until(lambda: replica.clock.tokens > 5)
            server.blind = True
            with pytest.raises(WeightlaneError, match="Cannot find any model weights"):
                await trainer.sync(models[1])
            server.blind = False
            completion = await running
            assert set(completion.versions) == {0}
            assert completion.token_ids == greedy_tokens(models[0], PROMPT, 60)
            assert (await trainer.sync(models[1])).replicas["rollout-0"].outcome is Outcome.COMMITTED
            server.unflushed = True
            with pytest.raises(WeightlaneError, match="version 3 could not be loaded, version 2 was restored"):
                await trainer.sync(models[0])
            again = await replica.generate("r", PROMPT, 5, greedy=True)
            assert (again.token_ids, again.versions) == (greedy_tokens(models[1], PROMPT, 5), [2] * 5)

    in_loop(test)


def test_a_server_that_loads_too_late_is_quarantined_until_the_next_version(models: list[Path]) -> None:
    async def test() -> None:
        async with served(models, commit_timeout_s=0.5) as (server, replica, trainer):
            server.before_load.clear()
            with pytest.raises(WeightlaneError):
                await trainer.sync(models[1])
            with pytest.raises(QuarantinedError, match="DeadlineExceededError"):
                await replica.generate_group(PROMPT, count=2, max_new_tokens=5, temperature=1.0, stop_token_ids=())
            server.before_load.set()
            replica._engine.config = replica.config.model_copy(update={"commit_timeout_s": HANG_S})
            await trainer.sync(models[0])
            assert set((await replica.generate("r", PROMPT, 5, greedy=True)).versions) == {trainer.version}

    in_loop(test)


@pytest.mark.parametrize(
    ("changed", "error"),
    [
        ({"info": {"speculative_algorithm": "EAGLE"}}, "speculative_algorithm = 'EAGLE'"),
        ({"info": {"dtype": "auto"}}, "does not say its dtype"),
        ({"original_logprobs": True}, "before the temperature"),
        ({"spans_missing": True}, "does not say which weights"),
    ],
)
def test_a_server_whose_answers_would_be_wrong_is_refused(models: list[Path], changed: Any, error: str) -> None:
    async def test() -> None:
        server = RecordedServer(models[1])
        for name, value in changed.items():
            setattr(server, name, server.info | value if name == "info" else value)
        replica = replica_of(models[0], extra_engine_args={"server": await server.start()})
        with pytest.raises(ConfigError, match=error):
            await replica.start()
        await server.close()

    in_loop(test)


def test_what_sglang_cannot_do_is_refused(models: list[Path]) -> None:
    for extra, error in (
        ({"server": "http://127.0.0.1:1", "tp_size": 2}, "tp_size, but the server"),
        ({"api-key": 1, "config": 2, "model": 3}, "api-key, config, model, but the replica sets them"),
    ):
        with pytest.raises(ConfigError, match=error):
            SglangEngine.check(RolloutConfig(engine="sglang", extra_engine_args=extra), models[0])
    with pytest.raises(ConfigError, match="kv_on_commit"):
        replica_of(models[0], kv_on_commit="keep")

    async def test() -> None:
        async with served(models) as (_, replica, _):
            with pytest.raises(ConfigError, match="enable_deterministic_inference"):
                await replica.generate("r", PROMPT, 5, seed=1)
            with pytest.raises(ConfigError, match="of all tokens, and not of those that top_k leaves"):
                await replica.generate("r", PROMPT, 5, top_k=3, top_p=0.5)
            longest = await replica.generate("r", PROMPT, 500)
            assert (len(longest.token_ids), longest.finish_reason) == (240 - len(PROMPT), "length")

    in_loop(test)


def test_a_server_of_its_own_is_started_and_its_death_is_told(models: list[Path], tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nshift 2\nexec {sys.executable} {recorded_server.__file__} "$@"\n')
    python.chmod(0o755)

    async def test() -> None:
        replica = replica_of(models[0], extra_engine_args={"python": str(python)})
        await replica.start()
        try:
            assert (await replica.generate("r", PROMPT, 3, greedy=True)).versions == [0] * 3
            running = asyncio.create_task(replica.generate("r", PROMPT, 200))
            await until(lambda: replica.clock.tokens > 3)
            engine: Any = replica._engine
            os.kill((await engine._calls.get("server_info", HANG_S))["pid"], signal.SIGKILL)
            with pytest.raises(WorkerDiedError):
                await running
            await until(lambda: engine._process.exit_code is not None)
            with pytest.raises(WorkerDiedError, match=r"(?s)exit code -9.*ready to roll"):
                await replica.watch()
        finally:
            await replica.close()
        python.write_text('#!/bin/sh\necho refused: "$@" >&2; exit 1\n')
        broken = {"python": str(python), "port_of_call": 3}
        with pytest.raises(WorkerDiedError, match=r"(?s)ended while starting.*--config \S+\.yaml .*--port-of-call 3"):
            await replica_of(models[0], extra_engine_args=broken).start()
        with pytest.raises(ConfigError, match=r"cannot be started: .*No such file"):
            await replica_of(models[0], extra_engine_args={"python": str(python) + ".missing"}).start()

    in_loop(test)


def test_a_server_ends_with_a_killed_owner_that_has_forked_and_leaves_no_shared_memory(tmp_path: Path) -> None:
    """SGLang maps a file that it never removes, and unlinks nothing when it is killed. A forked child holds the owner's pipes."""
    pid, segment = tmp_path / "pid", Path(f"/dev/shm/sglang_loads_{uuid.uuid4().hex}")
    owner = (
        "import os, subprocess, sys, time; from weightlane.rollout.contract.cleaner import Cleaner\n"
        "server = subprocess.Popen(sys.argv[1:], start_new_session=True); cleaner = Cleaner()\n"
        "cleaner.watch(server.pid)\n"
        "child = os.fork() or time.sleep(10000)\n"
        "print(child, flush=True); server.wait()"
    )
    code = (
        "import mmap, os, time; from pathlib import Path\n"
        f"file = open('{segment}', 'wb+'); file.truncate(4096); mapped = mmap.mmap(file.fileno(), 4096)\n"
        f"Path('{pid}.new').write_text(str(os.getpid())); Path('{pid}.new').rename('{pid}'); time.sleep(10000)"
    )
    server = [sys.executable, "-c", code]
    with subprocess.Popen([sys.executable, "-c", owner, *server], stdout=subprocess.PIPE) as process:
        wait_until(pid.exists, "server")
        assert process.stdout is not None
        child = int(process.stdout.readline())
        process.kill()
    try:
        wait_until(lambda: not Path("/proc", pid.read_text()).exists(), "end of the server")
        wait_until(lambda: not segment.exists(), "removal of its shared memory")
    finally:
        os.kill(child, signal.SIGKILL)
