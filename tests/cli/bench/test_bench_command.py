"""``weightlane bench``: tables for people, JSON and a plot for the rest, and its exit codes."""

from __future__ import annotations

from pathlib import Path

import pytest
from command_line import run

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
