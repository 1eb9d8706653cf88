"""The command itself: what it prints, its exit codes, and that nothing a user types ends in a traceback."""

from __future__ import annotations

import asyncio
import io
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from command_line import run
from waiting import HANG_S

from weightlane.ckpt_engines import (
    ConfigError,
    EngineUnavailableError,
    PeerLostError,
    StorageError,
    SyncAbortedError,
    UnknownEngineError,
    WorkerDiedError,
)
from weightlane.cli.output import console, http_address
from weightlane.cli.run.display import RunDisplay

EXAMPLE = Path(__file__).parents[2] / "examples" / "arithmetic" / "arithmetic.toml"


@pytest.mark.parametrize(
    ("raised", "code", "said"),
    [
        (KeyboardInterrupt(), 130, "interrupted; everything this run started has ended"),
        (asyncio.CancelledError(), 143, "terminated; everything this run started has ended"),
        (  # square brackets are part of the message, not markup of the terminal
            StorageError("no room in [/tmp].", part="disk", hint="Free some."),
            1,
            "error: disk: no room in [/tmp]. Free some.",
        ),
        (ConfigError("no such key.", part="configuration"), 2, "error: configuration: no such key."),
        (UnknownEngineError("no such engine.", part="registry"), 2, "error: registry: no such engine."),
        (EngineUnavailableError("no device.", part="nccl"), 2, "error: nccl: no device."),
        (WorkerDiedError("it died.", part="trainer", peer="trainer-1"), 3, "error: trainer (peer trainer-1): it died."),
        (SyncAbortedError.because(3, PeerLostError("it is gone.", part="gloo")), 3, None),
        (SyncAbortedError.because(3, StorageError("no room.", part="disk")), 1, None),
    ],
)
def test_every_way_to_end_has_its_exit_code(
    monkeypatch: pytest.MonkeyPatch, raised: BaseException, code: int, said: str | None
) -> None:
    def fail(*arguments: object) -> None:
        raise raised

    monkeypatch.setattr("weightlane.cli.config.any_config.load_any_config", fail)
    result = run("config", str(EXAMPLE))
    assert (result.exit_code, result.stdout) == (code, "")
    assert result.stderr.strip() == (said or f"error: {raised}")


def test_sigterm_ends_it_in_words_from_the_first_moment(children: Any, tmp_path: Path) -> None:
    config = tmp_path / "run.toml"
    os.mkfifo(config)  # whoever reads it waits
    arguments = [str(Path(sys.executable).with_name("weightlane")), "config", str(config)]
    child = children.start(arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    writer = os.open(config, os.O_WRONLY)  # returns when the command has opened it
    child.send_signal(signal.SIGTERM)
    os.close(writer)  # a signal just before the read does not interrupt it; the end of the file does
    out, err = child.communicate(timeout=HANG_S)
    assert (child.returncode, out, err) == (143, "", "terminated; everything this run started has ended\n")


def test_reasons_and_names_with_brackets_and_colons_are_shown_as_they_are() -> None:
    file = io.StringIO()
    display = RunDisplay(console(file), 10, live=False)
    display.version_aborted(version=3, facts={"error": "cannot write [/tmp/x]: [Errno 28] no :X: space"})
    display.item_failed("[red]odd[/red]", {"count": 2, "error": "[/] :X:"})
    display.say("in [/tmp/y] :X:")
    assert file.getvalue() == (
        "version 3 aborted: cannot write [/tmp/x]: [Errno 28] no :X: space\n"
        "a sample ([red]odd[/red]) failed: [/] :X: (later ones are only counted here; see failures.jsonl)\n"
        "in [/tmp/y] :X:\n"
    )


def test_addresses_are_printed_as_clients_take_them() -> None:
    assert (http_address("127.0.0.1", 80), http_address("::1", 80)) == ("http://127.0.0.1:80", "http://[::1]:80")
