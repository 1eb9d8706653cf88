"""Which versions requests can name, without vLLM: announcements, commits, rollbacks and failures of them."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from weightlane.ckpt_engines import CommitError, ConfigError, QuarantinedError
from weightlane.rollout.config import AdapterConfig
from weightlane.rollout.layout.loading.adapter_tensors import announced_tensors
from weightlane.rollout.replicas.adapter_versions import AdapterVersions

TRAVELS = AdapterConfig(rank=8, alpha=8.0)
LAYERS = ("model.layers.0.self_attn.q_proj", "model.layers.0.mlp.up_proj")
SMALL = AdapterConfig(rank=2, alpha=4.0, targets=("q_proj",))


def versions() -> AdapterVersions:
    return AdapterVersions("rollout-0", TRAVELS, 0)


def commit(adapters: AdapterVersions, version: int, keep: tuple[int, ...] = ()) -> dict[str, Any]:
    adapters.announce(version, SMALL, keep, LAYERS)
    made, fields = adapters.begin(version, ())
    adapters.committed(made)
    return fields


def named(adapters: AdapterVersions, count: int = 9) -> list[int]:
    """The versions up to `count` that requests can name."""
    found = []
    for version in range(1, count):
        try:
            adapter = adapters.of_request(version)
        except ConfigError:
            continue
        assert adapter is not None
        assert adapter.version == version
        found.append(version)
    return found


def test_the_ranks_keep_what_requests_can_name_or_compute_with_and_the_version_before() -> None:
    adapters = versions()
    first, second = commit(adapters, 1), commit(adapters, 2, keep=(1,))
    assert first["in_use"] == []
    assert first["announced"] == SMALL.model_dump()
    assert second["in_use"] == [first["adapter"]]
    adapters.announce(3, SMALL, (2, 7), LAYERS)
    made, third = adapters.begin(3, (first["adapter"], 0))
    assert named(adapters) == [2], "nothing begins with what is dropped, nor with what may not come"
    assert third["in_use"] == [first["adapter"], second["adapter"]], "one is in flight"
    adapters.committed(made)
    assert named(adapters) == [2, 3]
    made, fourth = adapters.begin(4, ())
    assert "announced" not in fourth
    assert fourth["in_use"] == [third["adapter"]], "which a rollback would return to"
    adapters.committed(made)
    assert named(adapters) == [4]
    assert adapters.current() == adapters.of_request(None) == made


def test_a_failed_update_that_changed_nothing_and_a_rollback_bring_back_what_could_be_named() -> None:
    adapters = versions()
    commit(adapters, 1)
    commit(adapters, 2, keep=(1,))
    before = adapters.current()
    adapters.announce(3, SMALL, (), LAYERS)
    adapters.begin(3, ())
    assert named(adapters) == []
    adapters.untouched()
    assert named(adapters) == [1, 2]
    commit(adapters, 3)
    assert named(adapters) == [3]
    assert adapters.begin_rollback(3, ())["adapter"] == before.id
    adapters.untouched()
    assert named(adapters) == [3]
    adapters.begin_rollback(3, ())
    adapters.rolled_back()
    assert named(adapters) == [2]
    made, fields = adapters.begin(3, ())
    assert fields["announced"] == SMALL.model_dump(), "it is still announced"
    assert fields["adapter"] == made.id == before.id + 3, "cached blocks of the first are not those of the second"


def test_the_rollback_of_an_announced_first_version_leaves_none_and_of_another_is_refused() -> None:
    adapters = versions()
    commit(adapters, 1)
    assert adapters.begin_rollback(1, ())["adapter"] == 0
    adapters.rolled_back()
    assert named(adapters) == []
    with pytest.raises(QuarantinedError, match="no version"):
        adapters.of_request(None)
    alone = adapters.of_request(0)
    assert alone is not None
    assert (alone.id, alone.version, alone.request()) == (0, 0, None)
    unannounced = versions()
    made, _ = unannounced.begin(1, ())
    unannounced.committed(made)
    with pytest.raises(CommitError, match="no adapter was committed before"):
        unannounced.begin_rollback(1, ())


def test_where_versions_are_weights_none_is_announced_or_named() -> None:
    weights = AdapterVersions("rollout-0", None, 0)
    assert weights.ready
    assert weights.of_request(None) is weights.of_request(0) is None
    with pytest.raises(ConfigError, match="versions are weights"):
        weights.of_request(1)
    with pytest.raises(ConfigError, match=r"versions are weights.*trainer\.lora\.publish"):
        weights.announce(1, SMALL, (), ())


def travelling(rank: int) -> dict[str, torch.Tensor]:
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
        tensors = travelling(rank)
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
