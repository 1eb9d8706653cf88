"""Versions that come quantised, in a vLLM that computes in another type: exactly what the reference quantiser leaves of them."""

from __future__ import annotations

from pathlib import Path

import pytest
from running_replica import PROMPT, Setup, running
from tiny_models import left_of, load_tensors, make_blocky_qwen3, quantised_copy

pytestmark = [pytest.mark.vllm, pytest.mark.slow]


def test_a_replica_serves_exactly_what_quantising_leaves_also_of_deltas(setup: Setup) -> None:
    setup.connect("gloo", codec="delta", quantise="fp8")
    setup.serve(1)
    setup.check(left_of(load_tensors(setup.models[1])))
    assert setup.probe("probe_way")[0][0] == "traced", "restored tensors do not go by copies"
    assert setup.probe("probe_sliced") == [True] * setup.world, "over a wire a rank gets its slices"
    for tensor in setup.trainer.live.values():
        tensor.view(-1)[::50] *= 1.01
    assert setup.run(setup.trainer.sync_live()).codec == "delta"
    setup.check(left_of(setup.trainer.live))


@pytest.mark.usefixtures("amx")  # vLLM's fp8 layers need it on a CPU
def test_both_ranks_of_a_quantised_replica_get_their_slices_and_hold_what_vllm_loads_from_the_whole(
    tmp_path: Path,
) -> None:
    plain = [make_blocky_qwen3(tmp_path / f"model{seed}", seed=seed, ranks=2) for seed in range(2)]
    first, second = (quantised_copy(model, tmp_path / f"{model.name}-fp8") for model in plain)
    with running(plain, first, tensor_parallel=2, dtype="bfloat16") as made:
        made.connect("gloo", quantise="fp8")
        report = made.run(made.trainer.sync(plain[1]))
        live, tokens = made.probe("probe_parameters"), made.greedy(PROMPT).token_ids
        made.probe("probe_reload", str(second))
        assert made.probe("probe_parameters") == live
        assert made.greedy(PROMPT).token_ids == tokens
    shared = sum(tensor.nbytes for name, tensor in load_tensors(second).items() if "norm" in name)
    everything = sum(tensor.nbytes for tensor in load_tensors(second).values())
    [replica] = report.replicas.values()
    assert everything + shared <= replica.nbytes < 1.1 * (everything + shared), "not every rank got its half alone"
