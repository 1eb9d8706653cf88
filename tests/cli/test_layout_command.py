"""``weightlane layout``: what it shows of a model, and what it says of one that cannot be shown."""

from __future__ import annotations

import io
import json
import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest
from rich.console import Console
from tiny_run import Material
from typer.testing import CliRunner, Result

from weightlane.cli import main as command
from weightlane.cli.layout import print_layout


def run(arguments: Sequence[str]) -> Result:
    return CliRunner().invoke(command.app, ["layout", *arguments], env={"COLUMNS": "160"})


@pytest.mark.vllm
@pytest.mark.slow
def test_every_tensor_of_every_rank_is_accounted_for(material: Material) -> None:
    result = run([str(material.model), "--tp", "2", "--json"])
    assert result.exit_code == 0, result.stderr
    report = json.loads(result.stdout)
    assert report["way"] == "traced"
    assert report["union"]["unused"] == {}
    assert [rank["rank"] for rank in report["ranks"]] == [0, 1]
    for rank in report["ranks"]:
        assert rank["tensors"] == report["union"]["tensors"]
        assert rank["refused"] == rank["reloaded"] == []
        assert rank["slices"] >= rank["parameters"]


def test_each_rank_says_which_experts_it_holds() -> None:
    facts = {"tensors": 4, "slices": 4, "bytes": 64, "parameters": 2, "constant_elements": 0, "learned_s": 0.01}
    ranks = [
        {"rank": rank, "way": "traced", "experts": [{"held": held, "of": 8}], "reloaded": [], "refused": []} | facts
        for rank, held in enumerate([[0, 1, 2, 5], [3, 4, 6, 7]])
    ]
    report = {
        "architecture": "Mixture",
        "dtype": "bfloat16",
        "tensor_parallel": 2,
        "expert_parallel": True,
        "way": "traced",
        "ranks": ranks,
        "tied": [],
        "union": {"tensors": 8, "elements": 64, "unused": {}},
    }
    console = Console(width=200, record=True, file=io.StringIO())
    print_layout(console, report)
    shown = console.export_text()
    assert "rank 0 holds experts 0-2, 5 of 8" in shown
    assert "rank 1 holds experts 3-4, 6-7 of 8" in shown
    assert "2 rank(s), experts divided between them" in shown
    report |= {"expert_parallel": False}
    print_layout(console, report)
    assert "rank 0 holds a slice of experts 0-2, 5 of 8" in console.export_text()


@pytest.mark.parametrize(
    ("spoil", "arguments", "message"),
    [
        ("remove", [], "is not a directory. Name the directory of a Hugging Face checkpoint."),
        ("weights", [], "model.safetensors does not exist."),
        ("", ["--tp", "0"], "0 ranks are not at least one. Give --tp a number from 1."),
        ("", ["--ep"], "expert parallelism needs more than one rank. Give --tp a number from 2."),
        ("", ["--dtype", "int3"], "'int3' is none of auto, float32"),
    ],
)
def test_what_a_user_can_cause_is_one_line_and_exit_code_2(
    spoil: str, arguments: list[str], message: str, material: Material, tmp_path: Path
) -> None:
    model = tmp_path / "model"
    shutil.copytree(material.model, model)
    if spoil == "remove":
        shutil.rmtree(model)
    elif spoil == "weights":
        (model / "model.safetensors").unlink()
    result = run([str(model), *arguments])
    assert result.exit_code == 2
    assert result.stdout == ""
    (line,) = result.stderr.splitlines()
    assert line.startswith("error: ")
    assert message in line
