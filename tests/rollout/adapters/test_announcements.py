"""Announcements of adapters, without vLLM: versions that requests can name, and tensors that are cut to what was announced."""

from __future__ import annotations

import itertools

import pytest
import torch

from weightlane.ckpt_engines import CommitError, ConfigError
from weightlane.rollout.config import AdapterConfig
from weightlane.rollout.contract.requests import AdapterVersion
from weightlane.rollout.layout.loading.adapter_tensors import announced_tensors
from weightlane.rollout.replicas.adapter_versions import AdapterVersions

SENT = AdapterConfig(rank=8, alpha=8.0)
LAYERS = ("model.layers.0.self_attn.q_proj", "model.layers.0.mlp.up_proj")
SMALL = AdapterConfig(rank=2, alpha=4.0, targets=("q_proj",))


def commit(adapters: AdapterVersions, version: int, keep: tuple[int, ...] = ()) -> AdapterVersion:
    adapters.announce(version, SMALL, keep, LAYERS)
    made, fields = adapters.begin(version, ())
    assert fields["announced"] == SMALL.model_dump()
    adapters.committed(made)
    return made


def test_a_version_that_is_committed_again_after_its_rollback_is_still_announced_and_has_another_id() -> None:
    adapters = AdapterVersions("rollout-0", SENT, 0)
    commit(adapters, 1)
    first = commit(adapters, 2, keep=(1,))
    adapters.begin_rollback(2, ())
    adapters.rolled_back()
    made, fields = adapters.begin(2, ())
    assert fields["announced"] == SMALL.model_dump()
    assert fields["adapter"] == made.id != first.id, "cached blocks of the first are not those of the second"
    assert adapters.of_request(1) == adapters.of_request(None), "the version before serves meanwhile"


def test_what_cannot_be_announced_named_or_rolled_back_is_refused() -> None:
    unannounced = AdapterVersions("rollout-0", SENT, 0)
    made, _ = unannounced.begin(1, ())
    unannounced.committed(made)
    with pytest.raises(CommitError, match="no adapter was committed before"):
        unannounced.begin_rollback(1, ())
    weights = AdapterVersions("rollout-0", None, 0)
    assert weights.of_request(None) is weights.of_request(0) is None
    with pytest.raises(ConfigError, match="versions are weights"):
        weights.of_request(1)
    with pytest.raises(ConfigError, match=r"versions are weights.*trainer\.lora\.publish"):
        weights.announce(1, SMALL, (), ())


def sent(rank: int) -> dict[str, torch.Tensor]:
    """A and B as they are sent, of rank 8: the first layer has an adapter of `rank`, and the second one has none."""
    tensors = {}
    for layer in LAYERS:
        for matrix in "AB":
            tensor = torch.zeros(8, 5, dtype=torch.bfloat16)
            if layer == LAYERS[0]:
                tensor[:rank] = torch.randn(rank, 5, generator=torch.Generator().manual_seed(rank))
            tensors[f"base_model.model.{layer}.lora_{matrix}.weight"] = tensor if matrix == "A" else tensor.T
    return tensors


def components(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """A view with one row for each component: the rows of A, and the columns of B."""
    return tensor if "lora_A" in name else tensor.T


@pytest.mark.parametrize("rank", [1, 3, 8])
def test_tensors_are_cut_to_the_announced_rank_and_layers_unless_a_number_would_be_lost(rank: int) -> None:
    """One number more, in each component of each tensor in turn."""
    values = itertools.cycle([1e-30, -1.0, float("inf"), float("nan")])
    for number, component in itertools.product(range(4), range(8)):
        tensors = sent(rank)
        name = list(tensors)[number]
        components(name, tensors[name])[component, (number + component) % 5] = next(values)
        if LAYERS[0] not in name or component >= rank:
            with pytest.raises(CommitError, match=f"{name} is not zero"):
                announced_tensors(tensors, {LAYERS[0]}, rank)
            continue
        cut = announced_tensors(tensors, {LAYERS[0]}, rank)
        assert cut.keys() == {name for name in tensors if LAYERS[0] in name}
        for kept, tensor in cut.items():
            wanted = components(kept, tensors[kept])[:rank]
            torch.testing.assert_close(components(kept, tensor), wanted, rtol=0, atol=0, equal_nan=True)
