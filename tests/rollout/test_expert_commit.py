"""Mixtures of experts on several ranks: exact weights and tokens, with every expert cut up or with whole ones on each rank."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from json_program import Program
from pydantic import ValidationError
from running_worker import Setup, running
from tiny_models import greedy_tokens, make_qwen3, make_qwen3_moe

from weightlane.ckpt_engines import ConfigError
from weightlane.rollout import RolloutConfig, RolloutWorker

pytestmark = [pytest.mark.vllm, pytest.mark.slow]


@pytest.fixture(scope="module", params=[False, True], ids=["tp2", "tp2-ep"])
def experts(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Setup]:
    """Two ranks that start from model 0 of three mixtures of eight experts."""
    base = tmp_path_factory.mktemp("models")
    models = [make_qwen3_moe(base / f"model{seed}", seed=seed, vocab=300) for seed in range(3)]
    with running(models, models[0], tensor_parallel=2, expert_parallel=request.param, dtype="float32") as made:
        made.new_trainer()
        made.connect()
        yield made
        made.trainer.close()


def test_experts_are_committed_by_copies_and_tokens_are_those_of_transformers(experts: Setup) -> None:
    assert experts.greedy([5, 6, 7]).token_ids == greedy_tokens(experts.models[0], [5, 6, 7], 16)
    for model in (1, 2, 1):
        version = experts.serve(model)
        experts.check_parameters(model)
        completion = experts.greedy([5, 6, 7])
        assert completion.token_ids == greedy_tokens(experts.models[model], [5, 6, 7], 16)
        assert completion.versions == [version] * 16
    assert experts.probe("probe_way") == [["traced", ""]] * 2


def test_experts_go_where_a_model_built_for_each_rank_alone_says(experts: Setup, process: Program) -> None:
    experts.serve(1)
    divided = experts.worker.config.expert_parallel
    for rank, layout in enumerate(experts.probe("probe_layout")):
        assert layout == process.call("rank_layout", str(experts.models[1]), "float32", rank, 2, divided)


def test_reloading_the_whole_model_gives_what_a_commit_gives(experts: Setup) -> None:
    experts.serve(1)
    experts.probe("probe_reload", str(experts.models[2]))
    experts.check_parameters(2)
    assert experts.greedy([8, 9]).token_ids == greedy_tokens(experts.models[2], [8, 9], 16)
    experts.serve(1)
    assert experts.greedy([9, 8]).token_ids == greedy_tokens(experts.models[1], [9, 8], 16)


@pytest.mark.parametrize(
    ("ranks", "experts_of_model", "expert_parallel", "message"),
    [
        (2, 0, True, "The model has no experts: leave rollout.expert_parallel (--ep) off."),
        (3, 8, True, "must be divisible by tensor parallel size (3). Set rollout.tensor_parallel (--tp) to a number"),
        (4, 2, True, "2 experts cannot be divided between 4 ranks. Set rollout.tensor_parallel (--tp) to at most 2."),
    ],
)
def test_what_cannot_be_divided_is_refused_in_words(
    ranks: int, experts_of_model: int, expert_parallel: bool, message: str, tmp_path: Path
) -> None:
    moe = experts_of_model > 0
    model = make_qwen3_moe(tmp_path, seed=0, experts=experts_of_model) if moe else make_qwen3(tmp_path, seed=0)
    worker = RolloutWorker("rollout-0", RolloutConfig(tensor_parallel=ranks, expert_parallel=expert_parallel), model)
    environment = dict(os.environ)
    with pytest.raises(ConfigError) as raised:
        asyncio.run(worker.start())
    os.environ.clear()
    os.environ.update(environment)
    assert message in str(raised.value)


def test_experts_are_divided_between_more_than_one_rank() -> None:
    with pytest.raises(ValidationError, match="set tensor_parallel to more than 1"):
        RolloutConfig(expert_parallel=True)
