"""``weightlane tinker`` on Ray: the example that drives it by the public SDK, and an end that leaves nothing behind."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from run_process import StartRun
from service_process import SDK
from tiny_run import Material
from waiting import HANG_S

from weightlane.cli.report.run_record import read_record

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.ray,
    pytest.mark.slow,
    pytest.mark.skipif(not SDK.is_dir(), reason="the tinker SDK is not installed: make setup installs it"),
]

EXAMPLE = Path(__file__).parents[2] / "examples/tinker/arithmetic.py"


@pytest.mark.exhaustive
def test_the_example_trains_and_samples_through_a_service_that_goes_on_when_it_or_one_of_its_processes_is_killed(
    material: Material, start_run: StartRun, tmp_path: Path
) -> None:
    config = tmp_path / "service.toml"
    config.write_text(
        f"""
        [run]
        dir = "{tmp_path / "files"}"
        [model]
        path = "{material.model}"
        [service]
        port = 0
        base_model = "tiny"
        allow_anonymous = true
        max_lora_rank = 8
        [ray]
        start_timeout_s = {HANG_S}
        [trainer]
        ranks = 2
        cpus_per_rank = 0.5
        [rollout]
        dtype = "float32"
        max_model_len = 32
        cpus_per_rank = 0.5
        kv_cache_memory_bytes = {64 << 20}
        """
    )

    def example(url: str, *arguments: str) -> str:
        environment = {
            **os.environ,
            "TINKER_BASE_URL": url,
            "TINKER_API_KEY": "tml-any",
            "PYTHONPATH": os.pathsep.join([os.environ.get("PYTHONPATH", ""), str(SDK)]),
            "PYTHONWARNINGS": "ignore",
        }
        command = [sys.executable, str(EXAMPLE), "--data", str(material.train.parent), "--rank", "4", *arguments]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=HANG_S, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout

    steps = ("--supervised", "3", "--reinforce", "2")
    saved = ""
    for number, code in enumerate((-signal.SIGKILL, 0)):
        run = start_run(["tinker", str(config)])
        run.wait_for("TINKER_BASE_URL=")
        if number:
            run.kill("VLLM::EngineCore")
            run.wait_for("the engine's processes are gone.")
            run.wait_for("TINKER_BASE_URL=", times=2)
            assert list((tmp_path / "files" / "logs").glob("worker-*"))
        found = re.search(r"TINKER_BASE_URL=(http://\S+?)\)", run.out)
        assert found
        told = example(found[1], *steps, *(["--resume", saved] if number else []))
        assert told.count("accuracy") == 3, told
        saved = told.rpartition("saved: ")[2].strip()
        run.interrupt(signal.SIGTERM if code == 0 else signal.SIGKILL)
        ended = run.end()
        assert ended.code == code, ended.out + ended.err
        if code == 0:
            assert ended.err == ""
        else:  # the process that cleans up for the killed one
            assert ended.err.startswith("error: ray: the process of the run was killed"), ended.err
            assert ended.err.endswith("Start the service again: it goes on from the files of run.dir.\n"), ended.err
    record = read_record(tmp_path / "files")
    # Of the steps of reinforcement learning those count in which any reward differed.
    assert all(3 <= model["steps"] <= 5 for model in record["service"]["models"])
    assert len(record["service"]["models"]) == 2
    assert record["syncs"], "adapters were published"
