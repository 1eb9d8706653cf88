"""Versions that come quantised, in a vLLM that computes in another type: exactly what the reference quantiser leaves of them."""

from __future__ import annotations

import shutil
from contextlib import closing
from pathlib import Path

import pytest
import torch
from quantised_reference import restored
from running_worker import Setup, running
from safetensors.torch import save_file
from tiny_models import greedy_tokens, load_tensors, make_blocky_qwen3, quantised_copy

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

PROMPT = [5, 6, 7]


def left_of(tensors: dict[str, torch.Tensor], scheme: str) -> dict[str, torch.Tensor]:
    """What a replica must hold."""
    return {name: restored(tensor, scheme) if "_proj." in name else tensor for name, tensor in tensors.items()}


def check(setup: Setup, tensors: dict[str, torch.Tensor], directory: Path) -> None:
    """The replica holds these tensors, and decodes with them what transformers does."""
    setup.check_tensors(tensors)
    shutil.copytree(setup.models[0], directory)
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    assert setup.greedy(PROMPT).token_ids == greedy_tokens(directory, PROMPT, 16)


@pytest.mark.parametrize(("scheme", "backend"), [("fp8", "shm"), ("fp8", "gloo"), ("int8", "filesystem")])
def test_a_replica_serves_exactly_what_quantising_leaves(
    setup: Setup, scheme: str, backend: str, tmp_path: Path
) -> None:
    setup.trainer.close()
    options = {"path": str(tmp_path / "store")} if backend == "filesystem" else {}
    setup.new_trainer(backend, quantise=scheme, options=options)
    setup.connect()
    for model in (1, 2):
        version = setup.serve(model)
        check(setup, left_of(load_tensors(setup.models[model]), scheme), tmp_path / f"v{version}")
    assert setup.probe("probe_way")[0][0] == "traced", "restored tensors do not go by copies"
    if backend == "gloo":  # everything is shown through shared memory, and stored; over a wire a rank gets its slices
        assert setup.probe("probe_sliced") == [setup.world > 1] * setup.world


def test_both_ranks_of_a_quantised_replica_get_their_slices_and_hold_what_vllm_loads_from_the_whole(
    tmp_path: Path,
) -> None:
    if not torch.cpu._is_amx_tile_supported():
        pytest.skip("vLLM's fp8 layers need AMX on a CPU")
    plain = [make_blocky_qwen3(tmp_path / f"model{seed}", seed=seed, ranks=2) for seed in range(2)]
    first, second = (quantised_copy(model, tmp_path / f"{model.name}-fp8", "fp8") for model in plain)
    with (
        running(plain, first, tensor_parallel=2, dtype="bfloat16") as made,
        closing(made.new_trainer("gloo", quantise="fp8")) as trainer,
    ):
        made.connect()
        report = made.run(trainer.sync(plain[1]))
        live, tokens = made.probe("probe_parameters"), made.greedy(PROMPT).token_ids
        made.probe("probe_reload", str(second))
        assert made.probe("probe_parameters") == live
        assert made.greedy(PROMPT).token_ids == tokens
    shared = sum(tensor.nbytes for name, tensor in load_tensors(second).items() if "norm" in name)
    everything = sum(tensor.nbytes for tensor in load_tensors(second).values())
    [replica] = report.replicas.values()
    assert everything + shared <= replica.nbytes < 1.1 * (everything + shared), "not every rank got its half alone"


def test_deltas_of_quantised_bytes_reach_a_replica_exactly(setup: Setup) -> None:
    setup.trainer.close()
    setup.new_trainer(codec="delta", quantise="fp8")
    setup.connect()
    setup.serve(1)
    for version in range(3):
        for tensor in setup.trainer.live.values():
            tensor.view(-1)[version::50] *= 1.01
        assert setup.run(setup.trainer.sync_live()).codec == "delta"
        setup.check_tensors(left_of(setup.trainer.live, "fp8"))
