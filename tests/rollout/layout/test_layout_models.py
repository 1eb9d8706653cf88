"""In every architecture, versions are bit for bit what vLLM makes of their files when it starts."""

from __future__ import annotations

import os
import tempfile
import threading
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from bits import bits
from hub_forms import HUB_FORMS
from installed import install
from json_program import Program
from layout_models import random_bits
from running_replica import probed_replica, started
from tiny_models import make_architecture, make_llama, make_qwen3_moe
from zoo_kind import make
from zoo_models import KINDS

from weightlane.ckpt_engines import ConfigError
from weightlane.rollout.layout.proof.device_room import room_for_second, set_aside

pytestmark = [pytest.mark.vllm, pytest.mark.slow]
EXP = "A: loading reads it back (exp)"
BFLOAT16_CONV = "conv1d.weight: the layer repacks this weight" if torch.cpu._is_avx512_bf16_supported() else EXP
"""Where the CPU has instructions for bfloat16, vLLM packs a convolution's weight and leaves a view of what it was before."""


def compared(process: Program, kind: str, folder: Path, dtype: str, way: str = "", hub: str = "") -> dict[str, Any]:
    """Run `layout_process.compare` on an architecture of the zoo, and check that it starts as vLLM has loaded it."""
    model = make(KINDS[kind], folder / "model", seed=1, dtype=getattr(torch, dtype))
    answer: dict[str, Any] = process.call("compare", str(model), dtype, KINDS[kind].options, way, hub)
    assert answer.get("started") == [], answer
    return answer


@pytest.mark.parametrize(
    ("hub", "way"),
    [
        ("gpt2", ""),  # names without their prefix, masks
        ("gpt2", "reload"),
        ("tied-copy", ""),
        ("shared-kv", ""),
        ("shards", ""),  # experts
    ],
)
def test_a_checkpoint_as_a_hub_has_it_takes_versions_whole_in_slices_and_in_place(
    hub: str, way: str, process: Program, tmp_path: Path
) -> None:
    """Under the names of a trainer, and with what no rank reads. `make test-zoo` shows it of 84 architectures."""
    answer = compared(process, HUB_FORMS[hub].kind, tmp_path, "bfloat16", way, hub)
    assert answer["way"] == (way or "traced"), answer["summary"]
    assert way or answer["copies"] > 10
    assert answer["after"] == answer["sparse"] == []


def test_a_model_that_hides_a_tensor_from_the_trace_goes_through_vllms_own_loading_and_is_what_a_fresh_load_makes(
    process: Program, tmp_path: Path
) -> None:
    answer = compared(process, "phi", tmp_path, "bfloat16")
    assert answer["way"] == "reload"
    assert answer["after"] == []


def test_layers_that_cannot_be_copied_into_are_named_and_are_right_nevertheless(
    process: Program, tmp_path: Path
) -> None:
    answer = compared(process, "mamba2", tmp_path, "bfloat16")
    assert answer["way"] == "mixed"
    layers = [name.removesuffix(".conv1d") for name in answer["reloaded"]]
    assert len(set(layers)) == 2
    assert all(name.endswith("mixer") for name in layers)
    assert BFLOAT16_CONV in answer["summary"]
    assert answer["after"] == []


def test_what_vllms_own_loading_would_get_wrong_is_refused_by_name_and_nothing_is_changed(
    process: Program, tmp_path: Path
) -> None:
    """vLLM keeps the old experts of this model when it is loaded again, and says nothing."""
    answer = compared(process, "gpt-oss", tmp_path, "bfloat16", "reload")
    assert "new versions of this model would not be right: model.layers.0." in answer["refused"]
    assert "differs from an ordinary load" in answer["refused"]
    assert answer["after"] == []


def test_a_version_of_which_one_element_is_not_written_does_not_pass_the_rehearsal(
    process: Program, tmp_path: Path
) -> None:
    trouble = process.call("rehearsed_badly", str(make_architecture("qwen3-tied", tmp_path)))
    assert trouble == "model.layers.1.mlp.down_proj.weight differs from an ordinary load"


@pytest.mark.parametrize("kind", ["qwen3-tied", "mamba2"])
def test_versions_that_are_written_bucket_after_bucket_are_what_a_fresh_load_makes(
    kind: str, process: Program, tmp_path: Path
) -> None:
    answer = process.call("in_place", str(make_architecture(kind, tmp_path)), "float32", 192, "")
    mixers = [f"backbone.layers.{layer}.mixer" for layer in range(2)]
    assert [answer["way"], answer["reloaded"]] == (["mixed", mixers] if kind == "mamba2" else ["traced", []])
    assert answer["after_learning"] == answer["after"] == []


def test_a_layer_that_computes_from_a_hidden_copy_is_found_out_and_loaded_by_vllm_as_its_tensors_become_complete(
    process: Program, tmp_path: Path
) -> None:
    """Also behind what is never computed the same twice, which is no reason for anything."""
    model = str(make_architecture("llama", tmp_path))
    for unsteady in ("", "gate_up_proj", "between"):
        answer = process.call("in_place", model, "float32", 4096, "down_proj", unsteady)
        assert answer["way"] == "reload"
        assert "layers.0.mlp.down_proj does not compute what it computes after an ordinary load" in answer["why"]
        assert answer["after_learning"] == answer["after"] == []
    answer = process.call("in_place", model, "float32", 4096, "", "gate_up_proj")
    assert answer["way"] == "traced"
    assert answer["after"] == []


def test_parameters_that_move_and_other_types_are_learned_anew(process: Program, tmp_path: Path) -> None:
    answer = process.call("moved", str(make_architecture("qwen3-tied", tmp_path)), "bfloat16")
    assert answer == {
        "traced_again": True,
        "differing": [],
        "kept": True,
        "ways": ["traced"],
        "sent": ["torch.float32"],
        "cast": [],
        # Once: the same copies need not be shown again.
        "rehearsed": 1,
    }


def test_what_gave_way_to_vllms_own_loading_does_so_again_without_a_rehearsal_while_the_model_serves(
    process: Program, tmp_path: Path
) -> None:
    answer = process.call("later_versions", str(make_architecture("llama", tmp_path)))
    assert answer["ways"] == ["reload", "reload"]
    assert answer["may_move"] == [True, False], "versions of other tensors are rehearsed, and no weight moves for them"


def test_weights_that_are_set_aside_come_back_bit_for_bit_for_all_who_view_them() -> None:
    tensors = [random_bits((3, 5), torch.bfloat16, seed=1), torch.zeros(0), random_bits((4,), torch.float32, seed=2)]
    seen = [*tensors, tensors[0].T, tensors[0][1:, 2:], tensors[2][::2]]
    before = [bits(tensor) for tensor in seen]
    storages = [tensor.untyped_storage() for tensor in tensors]
    with suppress(KeyError), set_aside(storages):
        assert [storage.nbytes() for storage in storages] == [0, 0, 0]
        raise KeyError("what goes wrong meanwhile")
    assert all(torch.equal(bits(tensor), wanted) for tensor, wanted in zip(seen, before, strict=True))
    with (
        mock.patch.object(torch.accelerator, "get_memory_info", return_value=(0, 1)),
        pytest.raises(ConfigError, match="has no room on cuda:0 next to this one, which serves"),
        room_for_second(torch.nn.Linear(2, 2), torch.device("cuda", 0), may_move=False),
    ):
        pass


def test_experts_with_biases_compute_what_vllms_kernel_does_and_the_same_in_parts(process: Program) -> None:
    answer = process.call("experts_beside_kernel")
    assert answer["size"] > 0.1
    assert answer["kernel"] < 1e-4
    assert answer["divided"] < 1e-5


def test_an_error_of_a_layer_that_computes_is_a_typed_refusal_that_names_the_layer_the_cause_and_a_remedy(
    process: Program, tmp_path: Path
) -> None:
    reported, refused = process.call("with_broken_layer", str(make_architecture("llama", tmp_path)), "1.mlp.down_proj")
    cause = "model.layers.1.mlp.down_proj: RuntimeError: invalid weight input features 16"
    assert f"vLLM has loaded it and cannot compute with it: {cause}" in reported
    assert "gemm.cpp" not in reported
    assert refused.startswith("ConfigError: ")
    assert cause in refused
    assert "Set the dtype to bfloat16." in refused


def test_latent_attention_takes_versions_on_a_cpu_with_amx_and_what_its_kernels_refuse_names_the_layer(
    process: Program, tmp_path: Path
) -> None:
    """On a CPU that is taken for one with AMX; vLLM itself would choose ``AMX_MLA``."""
    narrow = replace(KINDS["deepseek-v2"], sizes=KINDS["deepseek-v2"].sizes | {"qk_nope_head_dim": 16})
    model = str(make(narrow, tmp_path, seed=1, dtype=torch.bfloat16))
    for dtype, cause in (("bfloat16", "invalid weight input features 16"), ("float32", "expect weight to be bfloat16")):
        kind, text = process.call("refused_with_amx", model, dtype, "AMX_MLA")
        assert kind == "ConfigError"
        assert (
            f"vLLM cannot build the model of rank 0: model.layers.0.self_attn.mla_attn.mla_attn: RuntimeError: {cause}"
            in text
        )
        assert "Set the dtype to bfloat16" in text
        assert process.call("refused_with_amx", model, dtype, "") == []


def test_a_report_is_rehearsed_on_every_rank_and_all_together_use_every_expert(
    process: Program, tmp_path: Path
) -> None:
    made = process.call("report", str(make_qwen3_moe(tmp_path, seed=0, experts=7)), 2, True)
    assert (made["method"], made["refusal"], made["not_rehearsed"]) == ("traced", "", "")
    assert made["union"]["unused"] == {}
    held = [[0, 1, 2, 3], [4, 5, 6]]
    assert [rank["experts"] for rank in made["ranks"]] == [[{"held": numbers, "of": 7}] for numbers in held]
    for rank in made["ranks"]:
        assert rank["refused"] == rank["reloaded"] == []
        assert rank["needed_elements"] < made["union"]["elements"]
    tensors = made["union"]["tensors"]
    others = [3 * (7 - len(numbers)) * 2 for numbers in held]  # three matrices for each expert in each of two layers
    assert [rank["tensors"] for rank in made["ranks"]] == [tensors - missing for missing in others]


BREAKS_ENV = "BREAKS_A_LAYER"
PLUGIN = f"""
import os

def register():
    from vllm.model_executor.layers.linear import UnquantizedLinearMethod
    plain = UnquantizedLinearMethod.process_weights_after_loading

    def breaking(self, layer):
        if {BREAKS_ENV!r} in os.environ and layer.prefix.endswith("1.mlp.down_proj"):
            raise RuntimeError("invalid weight input features 16")
        plain(self, layer)

    UnquantizedLinearMethod.process_weights_after_loading = breaking
"""


def test_a_layer_that_fails_while_a_replica_starts_is_named_with_its_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(tmp_path / "site", "breaking_plugin", PLUGIN, "breaking = breaking_plugin:register", "vllm.general_plugins")
    monkeypatch.syspath_prepend(tmp_path / "site")
    monkeypatch.setenv(BREAKS_ENV, "1")
    replica = probed_replica("rollout-0", make_llama(tmp_path / "model", seed=0), in_engine=True, dtype="float32")
    with pytest.raises(ConfigError) as caught, started(replica):
        pass
    assert caught.value.message == (
        "vLLM cannot load the model: model.layers.1.mlp.down_proj: RuntimeError: invalid weight input features 16."
    )
    assert "bfloat16" in caught.value.hint
    assert caught.value.part.startswith("rollout rank ")
    assert not list(Path(tempfile.gettempdir()).glob(f"weightlane-start-{os.getpid()}-*"))


def test_an_interrupt_of_a_start_stays_one_although_a_process_has_told_why_it_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm.v1.engine.async_llm import AsyncLLM

    from weightlane.rollout.vllm import start_failures

    reported: list[Path] = []

    def interrupted(vllm_config: Any, **_: Any) -> None:
        start_failures._report(vllm_config, ConfigError("no room.", part="rollout rank 0"))
        reported.append(start_failures._file(vllm_config))
        assert reported[0].exists()
        raise KeyboardInterrupt

    monkeypatch.setattr(AsyncLLM, "from_vllm_config", interrupted)
    replica = probed_replica("rollout-0", make_llama(tmp_path / "model", seed=0), dtype="float32")
    with mock.patch.dict(os.environ), pytest.raises(KeyboardInterrupt):
        replica._engine._build(threading.Event())
    assert not reported[0].exists()
