"""Without our loop: the torchrun example publishes to vLLM OpenAI servers that know nothing of weightlane but its plugin."""

from __future__ import annotations

import asyncio
import contextlib
import json
import subprocess
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from ports import free_port
from publishing import OneRankTrainer, OtherReplica, served_by
from stock_server import StockServer
from tiny_models import add_tokenizer, greedy_tokens, make_qwen3
from waiting import HANG_S, wait_until

from weightlane.ckpt_engines import CommitError, ConfigError, QuarantinedError, SyncAbortedError, WeightlaneError
from weightlane.rollout import ServerReplica
from weightlane.rollout.vllm.shared_memory import segments_of_trees, unlink

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

EXAMPLE = Path(__file__).resolve().parents[3] / "examples" / "torchrun" / "train_and_publish.py"
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
    yield started
    segments = segments_of_trees([started.process.pid])
    started.process.terminate()
    started.process.wait(HANG_S)
    unlink(segments)  # vLLM leaves those between its ranks behind


def start_example(children: Any, server: StockServer, *, log: Path, **arguments: object) -> subprocess.Popen[str]:
    """The example as a user starts it, on two trainer ranks."""
    given = {"model": server.model, "server": server.url, "tensor_parallel": server.tensor_parallel, **arguments}
    flags = [str(part) for name, value in given.items() for part in (f"--{name.replace('_', '-')}", value)]
    torchrun = "-m torch.distributed.run --nproc-per-node 2 --rdzv-endpoint 127.0.0.1:0 --rdzv-backend c10d"
    with log.open("w") as file:
        process: subprocess.Popen[str] = children.start(
            [*torchrun.split(), "--master-port", "0", str(EXAMPLE), *flags],
            env={"GLOO_SOCKET_IFNAME": "lo"},
            stdout=file,
            stderr=subprocess.STDOUT,
        )
    return process


def test_the_example_is_as_short_as_promised_and_needs_no_ray_and_no_vllm() -> None:
    lines = EXAMPLE.read_text().splitlines()
    assert len(lines) < 60
    assert not [line for line in lines if line.startswith(("import", "from")) and ("ray" in line or "vllm" in line)]


@pytest.mark.parametrize(
    ("engine", "killed"),
    [
        ("gloo", True),
        pytest.param("shm", False, marks=pytest.mark.exhaustive),
        pytest.param("filesystem", False, marks=pytest.mark.exhaustive),
    ],
)
def test_a_plain_torchrun_script_publishes_to_a_stock_server_also_after_one_that_was_killed_in_the_middle_of_a_version(
    engine: str, killed: bool, server: StockServer, children: Any, tmp_path: Path
) -> None:
    if killed:
        kill_in_the_middle_of_a_version(server, children, tmp_path)
    trained, log = tmp_path / "trained", tmp_path / "log"
    options = json.dumps({"path": str(tmp_path / "versions")} if engine == "filesystem" else {})
    example = start_example(children, server, log=log, engine=engine, options=options, steps=3, out=trained)
    assert example.wait(HANG_S) == 0, log.read_text()
    assert server.version() == "3"
    wanted = greedy_tokens(trained, PROMPT, 16)
    assert server.greedy(PROMPT) == wanted
    assert wanted != greedy_tokens(server.model, PROMPT, 16)


def kill_in_the_middle_of_a_version(server: StockServer, children: Any, folder: Path) -> None:
    """The server serves what it had."""
    before, tokens, version = server.checksums(), server.greedy(PROMPT), server.version()
    log, store = folder / "killed.log", folder / "half"
    # A bucket per tensor, each of which has to reach the disk.
    slow = {"engine": "filesystem", "sync": json.dumps({"bucket_mib": 0.001})}
    options = json.dumps({"path": str(store), "fsync": True})
    example = start_example(children, server, log=log, options=options, **slow)

    def under_way() -> bool:
        assert example.poll() is None, log.read_text()
        return len(list(store.rglob("bucket-*"))) > 2

    wait_until(under_way, "bucket of the version")
    kill_all(example)
    assert server.greedy(PROMPT) == tokens
    assert (server.checksums(), server.version()) == (before, version)


def kill_all(example: subprocess.Popen[str]) -> None:
    """Kill -9 torchrun and its ranks, which it starts in sessions of their own."""
    for process in psutil.Process(example.pid).children(recursive=True):
        process.kill()
    example.kill()
    example.wait()


class SkippingLoop(asyncio.SelectorEventLoop):
    """An event loop for which a test lets time pass."""

    skipped_s = 0.0

    def time(self) -> float:
        """Seconds, as every timer of the loop has them, also those of HTTP calls."""
        return super().time() + self.skipped_s


class Wire:
    """Sits between a replica and the server; can keep the answers to one kind of call back, as a broken network does.

    Time then passes: so much that whoever waits for such an answer for `HANG_S / 2` waits no longer.
    """

    def __init__(self, port: int, loop: SkippingLoop) -> None:
        self._server_port, self._loop = port, loop
        self.swallow = b""
        """Path whose answers never come."""
        self.hangs_up = False
        """Whether the connection then breaks instead of staying silent."""

    async def __aenter__(self) -> str:
        self._listener = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        return f"http://127.0.0.1:{self._listener.sockets[0].getsockname()[1]}"

    async def __aexit__(self, *_: object) -> None:
        self._listener.close()

    async def _serve(self, near: asyncio.StreamReader, near_out: asyncio.StreamWriter) -> None:
        far, far_out = await asyncio.open_connection("127.0.0.1", self._server_port)
        asked = await near.read(1 << 16)  # each call has a connection of its own
        swallowed = bool(self.swallow) and self.swallow in asked

        async def there() -> None:
            data = asked
            while data:
                far_out.write(data)
                data = await near.read(1 << 16)
            far_out.close()

        async def back() -> None:
            # The server keeps the connection open after its answer, for longer than a request takes.
            while (data := await far.read(1 << 16)) and not swallowed:
                near_out.write(data)
            if swallowed and not self.hangs_up:
                self._loop.skipped_s += HANG_S / 2
            if self.hangs_up or not swallowed:
                near_out.close()

        with contextlib.suppress(OSError):
            await asyncio.gather(there(), back())


def over_the_wire(server_port: int, life: Callable[[str, Wire], Awaitable[None]]) -> None:
    """Run a replica's life, given the address to call and the wire that is there."""

    async def lived(wire: Wire) -> None:
        async with wire as url:
            await asyncio.wait_for(life(url, wire), HANG_S)

    with asyncio.Runner(loop_factory=SkippingLoop) as runner:
        loop = runner.get_loop()
        assert isinstance(loop, SkippingLoop)
        runner.run(lived(Wire(server_port, loop)))


async def unfinished(server: StockServer) -> dict[str, Any]:
    """Send requests, one after the other, until one does not end by itself: a busy server is slow to pause."""
    while (done := await asyncio.to_thread(server.complete, PROMPT, LONG))["finish_reason"] == "length":
        pass
    return done


def test_the_coordinator_commits_and_takes_back_and_quarantines_over_http(server: StockServer, tmp_path: Path) -> None:
    first, second = (make_qwen3(tmp_path / f"model{seed}", seed=seed, tied=True) for seed in (1, 2))

    async def life(url: str, wire: Wire) -> None:
        replica = ServerReplica(url, tensor_parallel=2, commit_timeout_s=HANG_S)
        trainer = OneRankTrainer(server.model)
        await replica.connect(trainer.address, trainer.backend, {})
        other = OtherReplica("picky", trainer)
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
        other.refuses_after = served_by(replica)
        with pytest.raises(SyncAbortedError, match="not with me"):
            await trainer.sync(first)
        assert (replica.version, server.version()) == (2, "2")
        assert await greedy() == greedy_tokens(second, PROMPT, 16), "it was taken back"
        other.refuses_after = None

        wire.swallow = b"/update_weights"
        impatient = ServerReplica(url, tensor_parallel=2, commit_timeout_s=HANG_S / 2)
        for wire.hangs_up, cause in ((False, "DeadlineExceeded"), (True, "WorkerDied")):
            server.ask("POST", "/resume", {})
            flying = asyncio.create_task(unfinished(server))
            while not server.running():  # noqa: ASYNC110 - only its metrics tell
                await asyncio.sleep(0.01)
            with pytest.raises(QuarantinedError, match=rf"cannot be trusted.*{cause}.*update_weights"):
                await impatient.commit(4)
            assert not impatient.serving
            assert (await asyncio.wait_for(flying, HANG_S))["finish_reason"] == "abort"
        wire.swallow = b""
        await replica.quarantine(WeightlaneError("told to"))
        assert not replica.serving
        waiting = asyncio.create_task(greedy())
        await asyncio.sleep(0.2)
        assert not waiting.done()
        await trainer.sync(first)
        assert replica.serving
        assert await waiting == greedy_tokens(first, PROMPT, 16)
        trainer.close()
        other.subscriber.close()

    async def greedy() -> list[int]:
        return await asyncio.to_thread(server.greedy, PROMPT)

    over_the_wire(server.port, life)


def test_what_keeps_a_server_from_connecting_is_said_and_leaves_it_serving(server: StockServer, free_port: int) -> None:
    tokens = server.greedy(PROMPT)
    address = {"host": "127.0.0.1", "port": free_port, "secret": "none"}

    def refusal(replica: ServerReplica, backend: str = "shm") -> WeightlaneError:
        with pytest.raises(WeightlaneError) as raised:
            asyncio.run(asyncio.wait_for(replica.connect(address, backend), HANG_S))
        return raised.value

    ranks = refusal(ServerReplica(server.url))
    assert isinstance(ranks, ConfigError)
    assert "the server has 2 ranks, and tensor_parallel says 1" in str(ranks)
    named = ServerReplica(server.url, tensor_parallel=2)
    assert "backend" in str(refusal(named, ""))
    assert type(refusal(named, "no-such-engine")).__name__ == "UnknownEngineError"
    assert server.greedy(PROMPT) == tokens
