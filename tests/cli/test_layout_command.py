"""``weightlane layout``: what it shows of a model, and what it says of one that cannot be shown."""

from __future__ import annotations

import io
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from command_line import assert_refused
from command_line import report as report_of
from rich.console import Console
from tiny_models import make_blocky_qwen3, quantised_copy
from tiny_run import Material

from weightlane.cli.commands.layout import print_layout

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.usefixtures("forked_answers")]


def shown(report: dict[str, Any]) -> str:
    """Print a report as a user sees it, and return the text."""
    console = Console(width=200, record=True, file=io.StringIO())
    print_layout(console, report)
    return console.export_text()


def test_every_tensor_of_every_rank_is_accounted_for(material: Material) -> None:
    report = report_of("layout", str(material.model), "--tp", "2")
    assert report["method"] == "traced"
    assert report["union"]["unused"] == {}
    assert [rank["rank"] for rank in report["ranks"]] == [0, 1]
    for rank in report["ranks"]:
        assert rank["tensors"] == report["union"]["tensors"]
        assert rank["refused"] == rank["reloaded"] == []
        assert rank["copies"] >= rank["parameters"]


@pytest.mark.usefixtures("amx")
def test_of_a_quantised_checkpoint_each_rank_needs_what_vllms_loading_reads(tmp_path: Path) -> None:
    model = quantised_copy(make_blocky_qwen3(tmp_path / "plain", seed=0, ranks=2), tmp_path / "fp8")
    report = report_of("layout", str(model), "--tp", "2")
    assert (report["method"], report["quantization"], report["refusal"]) == ("reload", "fp8", "")
    assert report["union"]["unused"] == {}
    everything = report["union"]["elements"]
    for rank in report["ranks"]:
        assert rank["method"] == "reload"
        assert rank["refused"], "nobody learns why it is not copied"
        assert everything / 2 <= rank["needed_elements"] < 0.51 * everything, "a rank reads its half"
    text = shown(report)
    assert "in bfloat16 (fp8) on 2 rank(s): versions are committed by vLLM's own loading" in text
    assert f"rank 1 needs {report['ranks'][1]['needed_elements']} of these elements for its loading" in text


def test_a_report_shows_what_is_not_copied_and_which_experts_each_rank_holds() -> None:
    facts = {"tensors": 4, "copies": 4, "bytes": 64, "parameters": 2, "constant_elements": 0, "learned_s": 0.01}
    ranks = [
        {"rank": rank, "method": "traced", "experts": [{"held": held, "of": 8}], "reloaded": [], "refused": []} | facts
        for rank, held in enumerate([[0, 1, 2, 5], [3, 4, 6, 7]])
    ]
    report = {
        "architecture": "Mixture",
        "dtype": "bfloat16",
        "quantization": "",
        "tensor_parallel": 2,
        "expert_parallel": True,
        "method": "traced",
        "refusal": "",
        "not_rehearsed": "a rehearsal takes 2.0 GB of memory, and 1.0 GB are free",
        "ranks": ranks,
        "tied": [],
        "unread": [f"mtp.{number}" for number in range(9)],
        "union": {"tensors": 8, "elements": 64, "unused": {}},
    }
    text = shown(report)
    assert "rank 0 holds experts 0-2, 5 of 8" in text
    assert "rank 1 holds experts 3-4, 6-7 of 8" in text
    assert "2 rank(s), experts divided between them" in text
    assert "not read by any rank, so that a version may lack it: mtp.0," in text
    assert "a rehearsal takes 2.0 GB of memory" in text
    assert "rank 0 holds a slice of experts 0-2, 5 of 8" in shown(report | {"expert_parallel": False})
    why = [{"tensor": "mlp.weight", "why": "the layer repacks it"}]
    slow = {"method": "reload", "reloaded": ["mlp"], "refused": why, "needed_elements": 33}
    reloaded = report | {
        "method": "reload",
        "refusal": "mlp: RuntimeError: no",
        "ranks": [rank | slow for rank in ranks],
    }
    text = shown(reloaded)
    for said in (
        "versions are refused",
        "committed versions would be wrong: mlp: RuntimeError: no",
        "rank 1 needs 33 of these elements for its loading",
        "rank 1 reloads mlp",
        "rank 1 does not copy mlp.weight: the layer repacks it",
    ):
        assert said in text


def test_what_a_user_can_cause_is_one_line_and_exit_code_2(material: Material, tmp_path: Path) -> None:
    shutil.copytree(material.model, tmp_path / "whole")
    shutil.copytree(material.model, tmp_path / "weightless", ignore=shutil.ignore_patterns("*.safetensors"))
    path = quantised_copy(make_blocky_qwen3(tmp_path / "plain", seed=0), tmp_path / "fp8") / "config.json"
    config = json.loads(path.read_text())
    config["quantization_config"]["weight_block_size"] = [64, 64]
    path.write_text(json.dumps(config))
    for model, arguments, message in (
        ("nowhere", [], "is not a directory. Name the directory of a Hugging Face checkpoint."),
        ("weightless", [], "model.safetensors does not exist."),
        ("whole", ["--tp", "0"], "a replica cannot have 0 ranks. Give --tp a number from 1."),
        ("whole", ["--ep"], "expert parallelism needs more than one rank. Give --tp a number from 2."),
        ("whole", ["--dtype", "int3"], "'int3' is none of auto, float32"),
        ("fp8", [], "the replica quantizes its weights (fp8) in a format in which versions are not sent."),
    ):
        assert_refused(message, "layout", str(tmp_path / model), *arguments)
