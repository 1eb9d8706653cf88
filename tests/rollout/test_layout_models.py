"""In every architecture, versions that are committed by copies are bit for bit those that vLLM's own loading makes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from layout_models import LayoutProcess
from tiny_models import make_architecture, make_qwen3_moe

pytestmark = [pytest.mark.vllm, pytest.mark.slow]


@pytest.fixture(scope="module")
def process(session_children: Any) -> Iterator[LayoutProcess]:
    started = LayoutProcess(session_children)
    yield started
    started.close()


@pytest.mark.parametrize("kind", ["qwen3-tied", "qwen3", "llama", "gpt2", "bloom", "gemma2", "phi3"])
def test_copies_leave_what_reloading_leaves_and_numbered_elements_arrive_where_the_layout_says(
    kind: str, process: LayoutProcess, tmp_path: Path
) -> None:
    answer = process.call("compare", str(make_architecture(kind, tmp_path)), "float32")
    assert answer["ways"] == ["traced", "traced"], answer["summary"]
    assert answer["slices"] > 10
    assert answer["after_first"] == answer["after_second"] == answer["sparse"] == answer["oracle"] == []


def test_what_is_computed_while_loading_is_refused_by_name_and_right_nevertheless(
    process: LayoutProcess, tmp_path: Path
) -> None:
    answer = process.call("compare", str(make_architecture("mamba2", tmp_path)), "float32")
    assert answer["ways"] == ["mixed", "mixed"]
    assert answer["reloaded"] == ["backbone.layers.0.mixer", "backbone.layers.1.mixer"]
    assert "backbone.layers.0.mixer.A: loading reads it back (exp)" in answer["summary"]
    assert answer["slices"] > 10
    assert answer["after_first"] == answer["after_second"] == answer["sparse"] == answer["oracle"] == []


@pytest.mark.parametrize("bucket_bytes", [192, 4096])
@pytest.mark.parametrize("kind", ["qwen3-tied", "gpt2", "bloom", "mamba2"])
def test_versions_that_are_written_bucket_after_bucket_are_those_that_reloading_makes(
    kind: str, bucket_bytes: int, process: LayoutProcess, tmp_path: Path
) -> None:
    answer = process.call("in_place", str(make_architecture(kind, tmp_path)), "float32", bucket_bytes, "")
    mixers = [f"backbone.layers.{layer}.mixer" for layer in range(2)]
    assert [answer["way"], answer["reloaded"]] == (["mixed", mixers] if kind == "mamba2" else ["traced", []])
    assert answer["after_proof"] == answer["after"] == []


def test_a_model_that_is_not_copied_into_is_loaded_by_vllm_as_its_tensors_become_complete(
    process: LayoutProcess, tmp_path: Path
) -> None:
    answer = process.call("in_place", str(make_architecture("llama", tmp_path)), "float32", 4096, "down_proj")
    assert answer["way"] == "reload"
    assert answer["after_proof"] == answer["after"] == []


def test_parameters_that_move_and_other_types_are_learned_anew(process: LayoutProcess, tmp_path: Path) -> None:
    answer = process.call("moved", str(make_architecture("qwen3-tied", tmp_path)), "bfloat16")
    assert answer == {
        "traced_again": True,
        "differing": [],
        "kept": True,
        "ways": ["traced"],
        "sent": ["torch.float32"],
        "cast": [],
    }


def test_a_layer_that_computes_from_a_hidden_copy_is_found_out_by_what_it_computes(
    process: LayoutProcess, tmp_path: Path
) -> None:
    answer = process.call("stale", str(make_architecture("llama", tmp_path)), "float32")
    assert answer["way"] == "reload"
    assert f"{answer['layer']} does not compute from its parameters alone" in answer["why"]


def test_what_vllm_cannot_run_is_told_in_words(process: LayoutProcess, tmp_path: Path) -> None:
    model = make_architecture("qwen3", tmp_path)
    kind, text = process.call("refused", str(model), 7)
    assert kind == "ConfigError"
    assert "heads (4) must be divisible by tensor parallel size (7)" in text
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"architectures": ["NobodysModel"], "model_type": "nobody"}))
    kind, text = process.call("refused", str(model), 1)
    assert kind == "ConfigError"
    assert "nobody" in text.lower()
    kind, text = process.call("refused", str(make_qwen3_moe(tmp_path / "moe", seed=0)), 1)
    assert kind == "ConfigError"
    assert "mixture-of-experts" in text
