"""In every architecture, versions that are committed by copies are bit for bit those that vLLM's own loading makes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from json_program import Program
from tiny_models import make_architecture, make_qwen3_moe

pytestmark = [pytest.mark.vllm, pytest.mark.slow]


@pytest.mark.parametrize(
    "kind", ["qwen3-tied", "qwen3", "llama", "gpt2", "bloom", "gemma2", "phi3", "qwen3-moe", "mixtral"]
)
def test_copies_leave_what_reloading_leaves_and_numbered_elements_arrive_where_the_layout_says(
    kind: str, process: Program, tmp_path: Path
) -> None:
    answer = process.call("compare", str(make_architecture(kind, tmp_path)), "float32")
    assert answer["ways"] == ["traced", "traced"], answer["summary"]
    assert answer["slices"] > 10
    assert answer["after_first"] == answer["after_second"] == answer["sparse"] == answer["oracle"] == []


def test_what_is_computed_while_loading_is_refused_by_name_and_right_nevertheless(
    process: Program, tmp_path: Path
) -> None:
    answer = process.call("compare", str(make_architecture("mamba2", tmp_path)), "float32")
    assert answer["ways"] == ["mixed", "mixed"]
    assert answer["reloaded"] == ["backbone.layers.0.mixer", "backbone.layers.1.mixer"]
    assert "backbone.layers.0.mixer.A: loading reads it back (exp)" in answer["summary"]
    assert answer["slices"] > 10
    assert answer["after_first"] == answer["after_second"] == answer["sparse"] == answer["oracle"] == []


@pytest.mark.parametrize("bucket_bytes", [192, 4096])
@pytest.mark.parametrize("kind", ["qwen3-tied", "gpt2", "bloom", "qwen3-moe", "mamba2"])
def test_versions_that_are_written_bucket_after_bucket_are_those_that_reloading_makes(
    kind: str, bucket_bytes: int, process: Program, tmp_path: Path
) -> None:
    answer = process.call("in_place", str(make_architecture(kind, tmp_path)), "float32", bucket_bytes, "")
    mixers = [f"backbone.layers.{layer}.mixer" for layer in range(2)]
    assert [answer["way"], answer["reloaded"]] == (["mixed", mixers] if kind == "mamba2" else ["traced", []])
    assert answer["after_proof"] == answer["after"] == []


def test_a_model_that_is_not_copied_into_is_loaded_by_vllm_as_its_tensors_become_complete(
    process: Program, tmp_path: Path
) -> None:
    answer = process.call("in_place", str(make_architecture("llama", tmp_path)), "float32", 4096, "down_proj")
    assert answer["way"] == "reload"
    assert answer["after_proof"] == answer["after"] == []


def test_parameters_that_move_and_other_types_are_learned_anew(process: Program, tmp_path: Path) -> None:
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
    process: Program, tmp_path: Path
) -> None:
    answer = process.call("stale", str(make_architecture("llama", tmp_path)), "float32")
    assert answer["way"] == "reload"
    assert f"{answer['layer']} does not compute from its parameters alone" in answer["why"]


def test_an_expert_that_computes_from_a_hidden_copy_is_found_out_too(process: Program, tmp_path: Path) -> None:
    answer = process.call("stale_expert", str(make_qwen3_moe(tmp_path, seed=0)), "float32")
    assert answer["way"] == "reload"
    assert "model.layers.1.input_layernorm does not compute from its parameters alone" in answer["why"]


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_tanh", "swigluoai"])
def test_experts_compute_what_vllms_kernel_does_and_the_same_in_parts(
    activation: str, biased: bool, process: Program
) -> None:
    answer = process.call("experts_beside_kernel", activation, biased)
    assert answer["size"] > 0.1
    assert answer["kernel"] < 1e-4
    assert answer["divided"] < 1e-5


def test_what_vllm_cannot_run_is_told_in_words(process: Program, tmp_path: Path) -> None:
    model = make_architecture("qwen3", tmp_path)
    kind, text = process.call("refused", str(model), 7)
    assert kind == "ConfigError"
    assert "heads (4) must be divisible by tensor parallel size (7)" in text
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"architectures": ["NobodysModel"], "model_type": "nobody"}))
    kind, text = process.call("refused", str(model), 1)
    assert kind == "ConfigError"
    assert "nobody" in text.lower()
    kind, text = process.call("refused", str(make_qwen3_moe(tmp_path / "moe", seed=0, experts=2)), 4)
    assert kind == "ConfigError"
    assert "2 experts cannot be divided between 4 ranks" in text


@pytest.mark.parametrize("expert_parallel", [False, True])
def test_all_ranks_together_use_every_expert_and_each_says_which_it_holds(
    expert_parallel: bool, process: Program, tmp_path: Path
) -> None:
    made = process.call("report", str(make_qwen3_moe(tmp_path, seed=0, experts=7)), 2, expert_parallel)
    assert made["way"] == "traced"
    assert made["union"]["unused"] == {}
    held = [[0, 1, 2, 3], [4, 5, 6]] if expert_parallel else [list(range(7))] * 2
    assert [rank["experts"] for rank in made["ranks"]] == [[{"held": numbers, "of": 7}] for numbers in held]
    for rank in made["ranks"]:
        assert rank["refused"] == rank["reloaded"] == []
        assert rank["needed_elements"] < made["union"]["elements"]
    tensors = made["union"]["tensors"]
    others = [3 * (7 - len(numbers)) * 2 for numbers in held]  # three matrices for each expert in each of two layers
    assert [rank["tensors"] for rank in made["ranks"]] == [tensors - missing for missing in others]
