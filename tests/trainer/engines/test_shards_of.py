"""`shards_of` a model in a program of one's own: types and names are the checkpoint's, and memory is what is trained."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from transformers import AutoModelForCausalLM, PreTrainedModel

from weightlane.ckpt_engines import ConfigError, ManifestError
from weightlane.sync import LocalShard, TensorSpec
from weightlane.sync.version.placement import without_aliases
from weightlane.trainer import shards_of


def check_live(shards: Sequence[LocalShard]) -> None:
    for shard in shards:
        assert shard.live
        for live in shard.live:
            live.check()


GATE = "model.layers.0.mlp.gate.weight"


@pytest.fixture
def model(models: dict[str, Path]) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(models["qwen3-tied"], dtype=torch.float32)


def test_what_is_float32_in_the_files_is_sent_as_that_whatever_the_model_is_held_in(
    models: dict[str, Path], tmp_path: Path
) -> None:
    (source,) = models["qwen3-moe"].glob("*.safetensors")
    tensors = {name: tensor if name == GATE else tensor.bfloat16() for name, tensor in load_file(source).items()}
    (directory := tmp_path / "Modell für Träger").mkdir()
    (directory / "config.json").write_text((models["qwen3-moe"] / "config.json").read_text())
    save_file(tensors, directory / "model.safetensors", {"format": "pt"})
    loaded = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    wire = {shard.spec.name: shard.spec.dtype for shard in shards_of(loaded, torch.bfloat16)}
    assert wire == {name: tensor.dtype for name, tensor in tensors.items()}
    made = AutoModelForCausalLM.from_config(loaded.config)
    made.name_or_path = "no such directory"
    assert {shard.spec.dtype for shard in shards_of(made, torch.bfloat16)} == {torch.bfloat16}
    given = {shard.spec.name: shard.spec.dtype for shard in shards_of(made, torch.bfloat16, checkpoint=directory)}
    assert given == wire
    with pytest.raises(ConfigError, match="no weights in"):
        shards_of(made, checkpoint=tmp_path / "nowhere")


def norm(model: PreTrainedModel) -> torch.nn.Module:
    return model.model.norm


def other(parameter: torch.nn.Parameter) -> torch.nn.Parameter:
    return torch.nn.Parameter(parameter.detach().clone())


def assigned(model: PreTrainedModel) -> None:
    model.load_state_dict({name: tensor.clone() for name, tensor in model.state_dict().items()}, assign=True)


CHANGES: list[tuple[Callable[[PreTrainedModel], object], str]] = [
    (lambda model: setattr(norm(model).weight, "data", norm(model).weight.data + 1), "other memory"),
    (lambda model: setattr(norm(model), "weight", other(norm(model).weight)), "other memory"),
    (lambda model: norm(model).to(torch.float64), "other memory"),
    (lambda model: setattr(model.model, "norm", torch.nn.Identity()), "other memory"),
    (lambda model: torch.utils.swap_tensors(norm(model).weight, other(norm(model).weight)), "other memory"),
    (assigned, "other memory"),
    (lambda model: delattr(norm(model), "weight"), "other memory"),
    (lambda model: setattr(model.lm_head, "weight", other(model.lm_head.weight)), r"lm_head\.weight is in other"),
    (lambda model: norm(model).weight.untyped_storage().resize_(0), "offloaded"),
]


def test_memory_that_is_no_longer_trained_is_not_published(models: dict[str, Path]) -> None:
    for change, says in CHANGES:
        model = AutoModelForCausalLM.from_pretrained(models["qwen3-tied"], dtype=torch.float32)
        norm(model).weight = other(norm(model).weight)  # a file's memory cannot shrink
        shards = shards_of(model)
        model(input_ids=torch.tensor([[1, 2, 3]]), labels=torch.tensor([[1, 2, 3]])).loss.backward()
        torch.optim.AdamW(model.parameters()).step()
        model.load_state_dict(model.state_dict())
        check_live(shards)
        change(model)
        with pytest.raises(ManifestError, match=says):
            check_live(shards)


def test_wrappers_that_change_no_parameter_are_looked_through(model: PreTrainedModel) -> None:
    before = shards_of(model)
    names = [shard.spec.name for shard in before]
    assert [shard.spec.name for shard in shards_of(torch.compile(model))] == names
    model.model.layers[0] = checkpoint_wrapper(model.model.layers[0])
    model.model.layers[1] = torch.compile(model.model.layers[1])
    wrapped = shards_of(model)
    assert [shard.spec.name for shard in wrapped] == names
    check_live([*before, *wrapped])
    model.model.layers[1].mlp.up_proj.weight.data = torch.zeros_like(model.model.layers[1].mlp.up_proj.weight)
    with pytest.raises(ManifestError, match=r"model\.layers\.1\.mlp\.up_proj\.weight is in other memory"):
        check_live(wrapped)


def test_wrappers_that_keep_parameters_in_another_form_are_refused(model: PreTrainedModel) -> None:
    layer = model.model.layers[0].mlp
    inner = layer.up_proj
    for name, says in (("base_layer", "adapters of PEFT"), ("_fsdp_wrapped_module", "FSDP1")):
        layer.up_proj = torch.nn.Module()
        layer.up_proj.add_module(name, inner)
        with pytest.raises(ConfigError, match=says):
            shards_of(model)


def test_a_tensor_with_two_names_is_sent_once_and_two_tensors_twice(model: PreTrainedModel) -> None:
    def sent() -> list[str]:
        state = model.state_dict()
        shards = [
            LocalShard.whole(TensorSpec(name, tuple(each.shape), each.dtype), each) for name, each in state.items()
        ]
        return [shard.spec.name for shard in without_aliases(shards[::-1])][::-1]

    assert sent() == [name for name in model.state_dict() if name != "lm_head.weight"]
    model.lm_head.weight = other(model.lm_head.weight)
    assert sent() == list(model.state_dict())
