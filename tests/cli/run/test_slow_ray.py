"""A Ray that does not come up is one line for the user, and the user's own signal where there was one."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import pytest
from tiny_run import Material

from weightlane.ckpt_engines import WorkerDiedError
from weightlane.cli.commands.train import run_training


@pytest.mark.parametrize(
    ("sent", "raised", "said"),
    [
        (None, WorkerDiedError, "Ray did not start on this machine: the current node timed out. See gcs_server"),
        (signal.SIGINT, KeyboardInterrupt, "^$"),
        (signal.SIGTERM, asyncio.CancelledError, "^$"),
    ],
)
def test_a_raylet_that_is_too_slow_is_told_in_words_and_a_signal_meanwhile_is_what_ended_the_run(
    sent: signal.Signals | None,
    raised: type[BaseException],
    said: str,
    material: Material,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import ray

    def time_out(**_: object) -> None:
        if sent is not None:
            os.kill(os.getpid(), sent)
        raise Exception("the current node timed out.")  # noqa: TRY002 - as Ray does

    monkeypatch.setattr(ray, "init", time_out)
    path = material.write_config(tmp_path, tmp_path / "run")
    with pytest.raises(raised, match=said):
        asyncio.run(run_training(path, [], resume=False, live=False))
