"""A replica derives the tensors it expects from its checkpoint, and names the file of a broken checkpoint."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save, save_file
from tiny_models import load_tensors, make_qwen3

from weightlane.ckpt_engines import ConfigError
from weightlane.rollout.layout.loading.checkpoint_expectation import expectation_of
from weightlane.sync import ExpectedTensor

TORN = save({"a": torch.zeros(64)})[:-8]


def test_it_holds_every_tensor_with_the_dtypes_of_disk_and_model(tmp_path: Path) -> None:
    model = make_qwen3(tmp_path, seed=0, dtype=torch.bfloat16)
    expectation = expectation_of(model, dtype=torch.float32, tied_embeddings=False)
    both = frozenset({torch.bfloat16, torch.float32})
    assert expectation.tensors == {
        name: ExpectedTensor(tuple(tensor.shape), both) for name, tensor in load_tensors(model).items()
    }
    assert not expectation.tied


@pytest.mark.parametrize("on_disk", [False, True])
def test_a_tied_output_embedding_is_an_alias_whether_it_is_on_disk_or_not(tmp_path: Path, on_disk: bool) -> None:
    model = make_qwen3(tmp_path, seed=0, tied=True)
    tensors = load_tensors(model)
    assert "lm_head.weight" not in tensors
    if on_disk:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
        save_file(tensors, model / "model.safetensors", {"format": "pt"})
    expectation = expectation_of(str(model), dtype=torch.float32, tied_embeddings=True)
    assert expectation.tied == {"lm_head.weight": "model.embed_tokens.weight"}
    assert expectation.tensors["lm_head.weight"] == expectation.tensors["model.embed_tokens.weight"]


def test_what_is_float32_in_a_narrower_checkpoint_has_to_arrive_as_that(tmp_path: Path) -> None:
    """Layers may compute with all of it: routers, state-space matrices, correction biases."""
    tensors = {"a": torch.zeros(2).bfloat16(), "b": torch.zeros(2).bfloat16(), "gate": torch.zeros(2)}
    save_file(tensors, tmp_path / "model.safetensors")
    found = expectation_of(tmp_path, dtype=torch.bfloat16, tied_embeddings=False).tensors
    assert {name: set(each.dtypes) for name, each in found.items()} == {name: {t.dtype} for name, t in tensors.items()}


def test_sharded_checkpoints_and_integer_tensors_are_read_and_computed_buffers_left_out(tmp_path: Path) -> None:
    save_file({"a": torch.zeros(2, 3), "l.rotary_emb.inv_freq": torch.zeros(4)}, tmp_path / "one.safetensors")
    save_file({"b": torch.zeros((), dtype=torch.int32)}, tmp_path / "two.safetensors")
    index = {"weight_map": {"a": "one.safetensors", "b": "two.safetensors", "l.rotary_emb.inv_freq": "one.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    expectation = expectation_of(tmp_path, dtype=torch.bfloat16, tied_embeddings=False)
    assert expectation.tensors == {
        "a": ExpectedTensor((2, 3), frozenset({torch.float32, torch.bfloat16})),
        "b": ExpectedTensor((), frozenset({torch.int32})),
    }


def test_a_layer_that_predicts_further_tokens_is_not_waited_for(tmp_path: Path) -> None:
    """vLLM loads it into draft models only, and trainers do not train it."""
    tensors = {f"model.layers.{layer}.mlp.up_proj.weight": torch.zeros(2, 3) for layer in (0, 1, 2, 10)}
    save_file(tensors, tmp_path / "model.safetensors")
    expected = {}
    for name, config in {"one": {"num_nextn_predict_layers": 1}, "none": {}}.items():
        (tmp_path / "config.json").write_text(json.dumps({"num_hidden_layers": 2, **config}))
        expected[name] = list(expectation_of(tmp_path, dtype=torch.bfloat16, tied_embeddings=False).tensors)
    assert expected == {"one": list(tensors)[:2], "none": sorted(tensors)}


@pytest.mark.parametrize(
    ("files", "complaint"),
    [
        ({}, r"model\.safetensors does not exist"),
        ({"model.safetensors": "not a header"}, "is broken"),
        ({"model.safetensors": TORN}, "is broken"),
        ({"model.safetensors.index.json": "{"}, "is not a safetensors index"),
        ({"model.safetensors.index.json": "[]"}, "is not a safetensors index"),
        ({"model.safetensors.index.json": '{"weight_map": {"a": "b.safetensors"}}'}, r"b\.safetensors does not exist"),
        ({"model.safetensors.index.json": '{"weight_map": {}}'}, "holds no weights"),
        # An index cannot lead out of its directory.
        (
            {"model.safetensors.index.json": '{"weight_map": {"a": "../outside.safetensors"}}'},
            r"inside/outside\.safetensors does not exist",
        ),
    ],
)
def test_a_broken_checkpoint_is_a_config_error_that_names_the_file(
    tmp_path: Path, files: dict[str, str | bytes], complaint: str
) -> None:
    save_file({"a": torch.zeros(1)}, tmp_path / "outside.safetensors")
    inside = tmp_path / "inside"
    inside.mkdir()
    for name, content in files.items():
        (inside / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(ConfigError, match=complaint):
        expectation_of(inside, dtype=torch.float32, tied_embeddings=False)


def test_a_missing_directory_and_an_unknown_embedding_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is not a directory"):
        expectation_of(tmp_path / "nowhere", dtype=torch.float32, tied_embeddings=False)
    with pytest.raises(ConfigError, match="neither a directory nor"):
        expectation_of("no-such-owner/no-such-model", dtype=torch.float32, tied_embeddings=False)
    save_file({"a": torch.zeros(64)}, tmp_path / "model.safetensors")
    with pytest.raises(ConfigError, match="input embedding is not unique: none found"):
        expectation_of(tmp_path, dtype=torch.float32, tied_embeddings=True)
