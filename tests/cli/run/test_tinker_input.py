"""``weightlane tinker`` finds a user's mistake before it starts anything, and ``check`` and ``config`` know its files."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import tomllib
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
from command_line import report, run
from tiny_run import Material

from weightlane.ckpt_engines import ConfigError
from weightlane.cli.config.any_config import load_any_config
from weightlane.cli.config.tinker_config import as_written, load_tinker_config
from weightlane.trainer.service.http.server import listening

EXAMPLE = Path(__file__).parents[3] / "examples/tinker/service.toml"


@pytest.fixture
def config(material: Material, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, nothing_starts: None) -> Path:
    monkeypatch.delenv("WEIGHTLANE_SERVICE_TOKEN", raising=False)
    path = tmp_path / "service.toml"
    path.write_text(
        f"""
        [run]
        dir = "{tmp_path / "files"}"
        [model]
        path = "{material.model}"
        [service]
        port = 0
        allow_anonymous = true
        [rollout]
        max_model_len = 32
        kv_cache_memory_bytes = {64 << 20}
        """
    )
    return path


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ("service.host=0.0.0.0", "allow_anonymous is true, and host 0.0.0.0 can be reached from other machines"),
        ("service.allow_anonymous=false", "Set WEIGHTLANE_SERVICE_TOKEN or service.tokens_file"),
        ("service.ports=1", "there is no key service.ports. Did you mean service.port?"),
        ("trainer.lora.rank=4", "clients say which adapters they train, up to service.max_lora_rank"),
        ("algorithm.group_size=4", "[algorithm] is no section of a service"),
        ("sync.quantise=fp8", "sync.quantise = fp8 is for versions of weights, and service.trains is adapters"),
        ("run.dir=/proc/version", "/proc/version cannot be used: Not a directory"),
        ("rollout.max_model_len=65", "the model has 64 positions"),
    ],
)
def test_a_mistake_is_named_by_its_key_before_anything_starts(config: Path, setting: str, said: str) -> None:
    for command in ("tinker", "check"):
        ended = run(command, str(config), "--set", setting, columns=1000)
        assert (ended.exit_code, ended.stdout) == (2, ""), ended.stderr
        assert said in ended.stderr
    assert not (config.parent / "files").exists()


@pytest.mark.usefixtures("forked_answers")
def test_what_a_service_takes_is_counted_without_starting_it(config: Path) -> None:
    assert report("check", str(config))["trainer"].startswith("1 ranks x 0 GPUs, ")
    assert not (config.parent / "files").exists()
    with socket.create_server(("127.0.0.1", 0)) as taken:
        ended = run("check", str(config), "--set", f"service.port={taken.getsockname()[1]}", columns=1000)
    assert ended.exit_code != 0
    assert "Set service.port to a free one" in ended.stderr
    for host in ("192.0.2.1", "é" * 70):
        with pytest.raises(ConfigError, match=r"Set service\.host to an address"), listening(host, 0):
            pass


def test_a_signal_while_it_starts_ends_it_by_its_exit_code(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[int] = []

    async def starting(*_: object) -> None:
        os.kill(os.getpid(), sent[-1])
        await asyncio.Event().wait()

    monkeypatch.setattr(
        "weightlane.cli.commands.tinker.RayCluster", lambda *_: nullcontext(SimpleNamespace(machines=list))
    )
    monkeypatch.setattr("weightlane.cli.commands.tinker.fitted", lambda config, *_: config)
    monkeypatch.setattr("weightlane.cli.commands.tinker.start_processes", starting)
    for number, code in ((signal.SIGINT, 130), (signal.SIGTERM, 143)):
        sent.append(number)
        ended = run("tinker", str(config))
        assert ended.exit_code == code, ended.stderr


def test_the_printed_configuration_reads_back_the_same(config: Path) -> None:
    printed = run("config", str(config), "--set", "service.max_lora_rank=4", "--set", "service.host=127.0.0.2")
    assert printed.exit_code == 0, printed.stderr
    again = config.with_name("printed.toml")
    again.write_text(printed.stdout)
    loaded = load_tinker_config(config, ["service.max_lora_rank=4", "service.host=127.0.0.2"])
    assert load_tinker_config(again) == loaded
    assert load_any_config(again) == as_written(loaded)
    assert "lora" not in tomllib.loads(printed.stdout)["trainer"]
    assert load_tinker_config(EXAMPLE).service.base_model == "arithmetic"


def test_the_files_of_a_service_are_no_run_to_export(config: Path) -> None:
    files = config.parent / "service"
    files.mkdir()
    for trains, said in (("adapters", "an adapter as PEFT's files"), ("all_weights", "all weights as Hugging Face's")):
        (files / "config.toml").write_text(run("config", str(config), f"--set=service.trains={trains}").stdout)
        ended = run("export", str(files), "--out", str(config.parent / "out"), columns=1000)
        assert ended.exit_code == 2
        assert f"has {said}" in ended.stderr
