"""TRL trains against a stock vLLM server, with its own loss and loop, and weightlane as its weight transfer."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from statistics import mean, median
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from ports import free_port
from stock_server import StockServer
from tiny_models import add_tokenizer, greedy_tokens, is_greedy, load_tensors, make_qwen3
from waiting import HANG_S, wait_until
from weightlane_trl import WeightlaneTransfer

from weightlane.ckpt_engines import ConfigError, ManifestError, WorkerDiedError

TRAIN = Path(__file__).with_name("train.py")
PROMPT = [5, 6, 7]


class Programs:
    """Starts Python programs, each in a process group of its own."""

    def __init__(self) -> None:
        self.started: list[subprocess.Popen[str]] = []

    def start(self, arguments: list[str], *, env: dict[str, str], **options: Any) -> subprocess.Popen[str]:
        options.pop("forked", None)
        environment = os.environ | env
        program = subprocess.Popen(
            [sys.executable, *arguments], env=environment, text=True, start_new_session=True, **options
        )
        self.started.append(program)
        return program


def shared_memory(program: subprocess.Popen[str]) -> set[Path]:
    """Named segments of shared memory that the processes of `program` have mapped."""
    found = set()
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if os.getpgid(int(process.name)) == program.pid:
                found |= set(re.findall(r"/dev/shm/\S+$", (process / "maps").read_text(), re.MULTILINE))
    return {Path(name) for name in found}


def group_is_gone(program: subprocess.Popen[str]) -> bool:
    """Whether `program`, which has ended, has left no process of its own behind."""
    try:
        os.killpg(program.pid, 0)
    except ProcessLookupError:
        return True
    return False


@pytest.fixture(scope="module")
def programs() -> Iterator[Programs]:
    made = Programs()
    yield made
    for program in made.started:
        if not group_is_gone(program):
            os.killpg(program.pid, signal.SIGKILL)
        program.wait(HANG_S)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = make_qwen3(tmp_path_factory.mktemp("trl") / "model", seed=0)
    add_tokenizer(path)
    config = json.loads((path / "tokenizer_config.json").read_text())
    config["chat_template"] = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    (path / "tokenizer_config.json").write_text(json.dumps(config))
    return path


def serve(programs: Programs, model: Path, *more: str) -> StockServer:
    names = ("--served-model-name", "tiny", str(model), "--logprobs-mode", "processed_logprobs")
    starting = SimpleNamespace(
        start=lambda arguments, **options: programs.start([*arguments, *names, *more], **options)
    )
    server = StockServer(starting, model, free_port(), 1, model.parent / "server.log")
    server.wait_ready()
    return server


def stop(server: StockServer) -> None:
    segments = shared_memory(server.process)
    server.process.terminate()
    server.process.wait(HANG_S)
    wait_until(lambda: group_is_gone(server.process), "end of the server's processes")
    assert not [segment for segment in segments if segment.exists()]


@pytest.fixture(scope="module")
def server(programs: Programs, model: Path) -> Iterator[StockServer]:
    started = serve(programs, model)
    yield started
    stop(started)


def train(programs: Programs, server: StockServer, kind: str, out: Path, *more: str) -> dict[str, Any]:
    """Run `train.py`, which must leave neither processes nor shared memory behind. Returns what it recorded."""
    out.mkdir()
    options = ["--model", str(server.model), "--server", server.url, "--out", str(out), *more]
    with (out / "log").open("w") as log:
        program = programs.start([str(TRAIN), kind, *options], env={}, stdout=log, stderr=subprocess.STDOUT)
        segments: set[Path] = set()

        def ended() -> bool:
            segments.update(shared_memory(program))
            return program.poll() is not None

        wait_until(ended, "end of the trainer", poll_s=0.5)
        assert program.returncode == 0, (out / "log").read_text()[-6000:]
    wait_until(lambda: group_is_gone(program), "end of the trainer's processes")
    assert not [segment for segment in segments if segment.exists()]
    return json.loads((out / "record.json").read_text())  # type: ignore[no-any-return]


def check_versions(versions: list[dict[str, Any]], out: Path) -> None:
    """The server named every version, and decoded what transformers does with the weights that the trainer had saved."""
    assert [version["served"] for version in versions] == [str(number + 1) for number in range(len(versions))]
    for version in versions:
        assert is_greedy(out / version["model"], PROMPT, version["tokens"]), version["served"]
    assert len({tuple(version["tokens"]) for version in versions}) > 2


@pytest.mark.parametrize("kind", ["async", "grpo"])
def test_the_reward_rises_and_every_version_gives_the_tokens_of_its_own_weights(
    programs: Programs, server: StockServer, tmp_path: Path, kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / kind
    record = train(programs, server, kind, out, "--steps", "24")
    assert record["error"] is None
    check_versions(record["versions"], out)
    first, last = (mean(rewards) for rewards in (record["rewards"][:5], record["rewards"][-5:]))
    pause_s, latency_s = (median(each[key] for each in record["versions"]) for key in ("pause_s", "latency_s"))
    figures = f"reward {first:.2f} to {last:.2f}, pause {pause_s:.3f} s, until a version served {latency_s:.3f} s"
    with capsys.disabled():
        print(f"\n{kind}: {figures} (medians)")  # noqa: T201 - docs/guides/frameworks.md states them
    assert len(record["versions"]) >= 20
    assert last > first + 0.1  # the mean of five steps strays by 0.014


def test_an_adapter_is_trained_by_trls_own_path_and_merged_by_weightlane_in_one_run(
    programs: Programs,
    server: StockServer,
    model: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """TRL's transfer of full weights needs GPUs; its adapters, which vLLM loads from files, do not."""
    monkeypatch.setenv("VLLM_ALLOW_RUNTIME_LORA_UPDATING", "1")
    with_adapters = serve(programs, model, "--enable-lora", "--max-lora-rank", "8", "--max-loras", "4")
    for kind, trained in (("adapter", with_adapters), ("merged-adapter", server)):
        out = tmp_path / kind
        record = train(programs, trained, kind, out, "--steps", "16")
        assert record["error"] is None
        check_versions(record["versions"], out)
        pause_s, latency_s = (median(each[key] for each in record["versions"]) for key in ("pause_s", "latency_s"))
        figures = f"pause {pause_s:.3f} s, until a version served {latency_s:.3f} s (medians)"
        with capsys.disabled():
            print(f"\n{kind}: {figures}, {record['tokens_per_s']:.0f} tokens/s")  # noqa: T201 - docs/guides/frameworks.md
    stop(with_adapters)


def test_a_model_that_the_server_does_not_serve_is_refused_with_its_reason(server: StockServer) -> None:
    tensors = load_tensors(server.model)
    transfer = WeightlaneTransfer(server.url)
    with pytest.raises(ManifestError, match=r"missing lm_head\.weight"):
        transfer.send_weights((name, tensor) for name, tensor in tensors.items() if name != "lm_head.weight")
    transfer.destroy()
    transfer = WeightlaneTransfer(server.url)
    transfer.send_weights(tensors.items())
    with pytest.raises(ManifestError, match=r"version before: lm_head\.weight"):
        transfer.send_weights([("lm_head.weight", torch.zeros(1))])
    transfer.send_weights(tensors.items())
    assert server.greedy(PROMPT) == greedy_tokens(server.model, PROMPT, 16)
    transfer.destroy()


def test_a_server_that_dies_while_trl_trains_ends_the_run_with_a_typed_error(
    programs: Programs, server: StockServer, tmp_path: Path
) -> None:
    left = shared_memory(server.process)
    kill = ("--kill", str(server.process.pid), "2")
    record = train(programs, server, "async", tmp_path / "killed", "--steps", "20", *kill)
    assert record["error"]["type"] in ("WorkerDiedError", "SyncAbortedError")
    assert "127.0.0.1" in record["error"]["text"]
    with pytest.raises(WorkerDiedError, match="does not answer"):
        WeightlaneTransfer(server.url).send_weights(load_tensors(server.model).items())
    for segment in left:  # vLLM cannot remove its own when it is killed
        segment.unlink(missing_ok=True)


def test_a_server_that_was_started_as_trl_says_is_named_with_the_option_that_it_needs(
    programs: Programs, model: Path
) -> None:
    other = serve(programs, model, "--weight-transfer-config", '{"backend": "nccl"}')
    with pytest.raises(ConfigError, match=r"another weight-transfer engine.*weightlane"):
        WeightlaneTransfer(other.url).send_weights(load_tensors(model).items())
    stop(other)
