"""``weightlane bench``: tables for people, JSON and a plot for the rest, and its exit codes."""

from __future__ import annotations

import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest
from command_line import run
from waiting import HANG_S

from weightlane.cli.bench.report import plot
from weightlane.cli.bench.report.bench_report import BenchReport


def test_tables_json_and_a_plot_come_of_one_run(tmp_path: Path) -> None:
    files = [tmp_path / "report.json", tmp_path / "report.png"]
    result = run(
        "bench", "--engine", "shm,hccl", "--codec", "dense", "--integrity", "full", "--model", "tiny", "--receivers", "1",
        "--density", "0.1", "--rounds", "1", "--set", "shm.max_shared_mib=64", "--json", str(files[0]), "--plot", str(files[1]),
        columns=220,
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    report = BenchReport.model_validate_json(files[0].read_text())
    assert [row.name for row in report.rows] == ["shm dense full"]
    assert report.setup.receivers == 1
    for text in ("tiny: 24 tensors", "shm", "yes", "torch_npu is not installed", "every receiver copies it at once"):
        assert text in result.output
    assert files[1].read_bytes().startswith(b"\x89PNG")
    title = plot.plot_title(report)
    assert title.startswith("shm: rollout stops for ")
    assert "x one copy" in title


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["--engine", "hccl"], 1, "torch_npu is not installed"),
        (["--engine", "shn"], 2, "Did you mean 'shm'?"),
        (["--model", "nowhere"], 2, "'nowhere' is neither a model that the benchmark knows nor a directory"),
        (["--rounds", "0"], 2, "rounds: Input should be greater than or equal to 1 (got 0)"),
        (["--engine", ","], 2, "engines: "),
        (["--set", "shm"], 2, "does not have the form engine.key=value"),
        (["--set", "gloo.host=1"], 2, "options are given for gloo, which is not measured"),
        (["--json", "/nowhere/at/all.json"], 2, "there is no directory /nowhere/at"),
        (["--plot", "report.docx"], 2, "report.docx does not end with a format that matplotlib can write. Formats: "),
        (["--rounds", "many"], 2, "Usage: "),
    ],
)
def test_what_cannot_be_done_is_said_in_words(arguments: list[str], code: int, said: str) -> None:
    result = run("bench", *arguments, columns=220)
    assert result.exit_code == code
    assert said in " ".join(result.output.split())
    assert "Traceback" not in result.output


@pytest.mark.exhaustive
def test_a_command_that_is_told_to_end_leaves_nothing(children: Any, tmp_path: Path) -> None:
    """Neither processes nor files; `tests/sync/bench` kills it outright."""
    bench = children.start(
        ["-c", "from weightlane.cli.main import main; main()", "bench", "--rounds", "1000", "--dir", str(tmp_path)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    for line in bench.stdout:
        if line.startswith("round 3"):
            break
    group = [path for path in Path("/proc").glob("[0-9]*/stat") if in_group(path, bench.pid)]
    assert len(group) == 5, "the command, the process that forks, the sender and two receivers"
    assert list(tmp_path.iterdir())
    bench.send_signal(signal.SIGTERM)
    said, _ = bench.communicate(timeout=HANG_S)
    assert (bench.returncode, said.splitlines()[-1]) == (143, "terminated; everything this run started has ended")
    assert not [path for path in group if in_group(path, bench.pid)]
    assert list(tmp_path.iterdir()) == []


def in_group(stat: Path, group: int) -> bool:
    try:
        return int(stat.read_text().rpartition(")")[2].split()[2]) == group
    except OSError:
        return False
