"""Algorithms over a dispatch with real engines in this process."""

from __future__ import annotations

import math
import random
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_batches import VOCAB
from engine_ranks import Teams, case, exhaustive, megatron
from judged_batches import TRAINER, judged_batch
from local_dispatch import in_dispatch, team_groups

from weightlane.ckpt_engines import ConfigError
from weightlane.trainer import (
    AlgorithmConfig,
    Objective,
    TokenBatch,
    TokenSequence,
    TrainerConfig,
    dpo,
    gae,
)
from weightlane.trainer.algorithms.composition import (
    algorithm_over,
    check_models,
    check_roles,
    policy_objective,
    rank_groups,
    role_names,
    role_specs,
)
from weightlane.trainer.algorithms.ppo import Ppo, critic_state, with_advantages
from weightlane.trainer.algorithms.roles import CRITIC, OBJECTIVE, POLICY, REFERENCE
from weightlane.trainer.algorithms.step import dpo_step
from weightlane.trainer.config import LoraConfig
from weightlane.trainer.data.sequences import IGNORED
from weightlane.trainer.dispatch.dispatch import WorkerDispatch
from weightlane.trainer.dispatch.role_spec import RoleSpec
from weightlane.trainer.objectives.config import CriticConfig, ReferenceConfig
from weightlane.trainer.objectives.policy_values import ADVANTAGES, REFERENCE_LOGPROBS, REWARD, ROLLOUT_LOGPROBS
from weightlane.trainer.objectives.value import OLD_VALUES, RETURNS


def test_advantages_are_those_of_the_formula_over_targets_only_and_whitened_over_the_batch() -> None:
    config = AlgorithmConfig(objective="ppo", gamma=0.9, gae_lambda=0.8, kl_coefficient=0.1)
    batch = judged_batch(0, rows=3)
    reference = [torch.linspace(-5, -3, sequence.length) for sequence in batch.sequences]
    values = [torch.linspace(0.1, 0.7, sequence.length) for sequence in batch.sequences]
    found = with_advantages(batch.with_values(REFERENCE_LOGPROBS, reference), values, config)
    advantages = []
    for sequence, log_probabilities, value, carried in zip(
        batch.sequences, reference, values, found.sequences, strict=True
    ):
        targets = sequence.targets != IGNORED
        rewards = -0.1 * (sequence.per_token[ROLLOUT_LOGPROBS] - log_probabilities)[targets]
        rewards[-1] += sequence.per_sequence[REWARD]
        each, returns = gae(rewards, value[targets], gamma=0.9, lam=0.8)  # see `test_losses`
        advantages.append(each)
        torch.testing.assert_close(carried.per_token[RETURNS][targets], returns, atol=1e-5, rtol=0)
        assert torch.equal(carried.per_token[OLD_VALUES], value)
    wanted = torch.cat(advantages)
    wanted = (wanted - wanted.mean()) / wanted.std(correction=0)
    micro = found.packed
    torch.testing.assert_close(micro.per_token[ADVANTAGES][micro.mask], wanted, atol=1e-4, rtol=0)


def test_ppo_trains_a_policy_and_a_critic_keeps_the_reference_and_goes_on_bit_for_bit_where_it_was_saved(
    models: dict[str, Path], tmp_path: Path
) -> None:
    algorithm = AlgorithmConfig(objective="ppo", kl_coefficient=0.05)
    assert role_names(algorithm) == [POLICY, CRITIC, REFERENCE]
    paths, state = dict.fromkeys(role_names(algorithm), models["qwen3-untied"]), tmp_path / "state" / "trainer"
    state.parent.mkdir()

    def roles(state: Path | None = None) -> list[RoleSpec]:
        objective = Objective(policy_objective(algorithm))
        return role_specs(algorithm, TRAINER, CriticConfig(learning_rate=2e-2), paths, objective, state=state)

    async def train(dispatch: WorkerDispatch) -> Any:
        trainers = algorithm_over(dispatch, algorithm)
        assert isinstance(trainers, Ppo)
        before = await dispatch[REFERENCE].forward(judged_batch(0))
        reports = [await trainers.train_step(judged_batch(0)) for _ in range(3)]
        await trainers.save(state)
        reports.append(await trainers.train_step(judged_batch(1)))
        after = await dispatch[REFERENCE].forward(judged_batch(0))
        assert all(torch.equal(left["logprobs"], right["logprobs"]) for left, right in zip(before, after, strict=True))
        return reports

    async def go_on(dispatch: WorkerDispatch) -> Any:
        return await algorithm_over(dispatch, algorithm).train_step(judged_batch(1))

    reports = in_dispatch(roles(), train)
    assert [report.step for report in reports] == [1, 2, 3, 4]
    errors = [report.metrics["critic/value_error_square"] for report in reports[:3]]
    assert errors[-1] < 0.5 * errors[0], "the critic learns the returns of one batch"
    assert "loss/reference_kl" not in reports[0].metrics, "the penalty is in the rewards, not in the loss, too"
    assert reports[0].metrics["reference_kl"] > 0.0
    assert critic_state(state).is_dir()
    resumed, last = in_dispatch(roles(state), go_on), reports[-1]
    assert (resumed.step, resumed.metrics, resumed.grad_norm) == (last.step, last.metrics, last.grad_norm)


def test_a_reference_pulls_a_policys_gradient_back_by_what_the_reference_says(models: dict[str, Path]) -> None:
    algorithm = AlgorithmConfig(objective="grpo", kl_coefficient=0.5, kl_estimator="k3")
    paths = {POLICY: models["qwen3-untied"], REFERENCE: models["qwen3-tied"]}
    objective = Objective(policy_objective(algorithm))
    batch = judged_batch(0)

    async def train(dispatch: WorkerDispatch) -> Any:
        said = [await dispatch[role].forward(batch) for role in (POLICY, REFERENCE)]
        return said, [await algorithm_over(dispatch, algorithm).train_step(batch) for _ in range(2)]

    said, reports = in_dispatch(role_specs(algorithm, TRAINER, CriticConfig(), paths, objective), train)
    policy, reference = (torch.cat([each["logprobs"] for each in outputs])[batch.packed.mask] for outputs in said)
    drift = reference - policy
    assert reports[0].metrics["reference_kl"] == pytest.approx(float((drift.exp() - 1 - drift).mean()), rel=1e-4)
    assert reports[-1].metrics["reference_kl"] < 0.9 * reports[0].metrics["reference_kl"]


@pytest.mark.parametrize(
    ("trainer", "own"),
    [
        case({}, 0, id="on the policy's ranks"),
        exhaustive({}, 1, id="on its own"),
        exhaustive(megatron({"pipeline_parallel": 2}, ranks=2), 2, id="megatron, on its own"),
    ],
)
def test_a_reference_becomes_the_policy_every_few_batches_and_goes_on_where_it_was_saved(
    teams: Teams, tmp_path: Path, trainer: dict[str, Any], own: int
) -> None:
    algorithm = AlgorithmConfig(objective="grpo", kl_coefficient=0.1, epochs=2)
    paths = dict.fromkeys((POLICY, REFERENCE), teams.models["qwen3-untied"])
    settings, config = ReferenceConfig(refresh_every=2, ranks=own), TrainerConfig(**{**TRAINER.model_dump(), **trainer})
    batch, state = judged_batch(0), tmp_path / "state" / "trainer"
    state.parent.mkdir()

    def roles(state: Path | None = None) -> list[RoleSpec]:
        objective = Objective(policy_objective(algorithm))
        return role_specs(algorithm, config, CriticConfig(), paths, objective, settings, state=state)

    def run(specs: list[RoleSpec], use: Any) -> Any:
        with team_groups(teams, specs) if trainer else nullcontext() as groups:
            return in_dispatch(specs, use, groups)

    async def said(dispatch: WorkerDispatch) -> list[torch.Tensor]:
        found = [await dispatch[role].forward(batch) for role in (POLICY, REFERENCE)]
        return [torch.cat([each["logprobs"] for each in outputs]) for outputs in found]

    async def train(dispatch: WorkerDispatch) -> Any:
        trainers = algorithm_over(dispatch, algorithm, settings, tmp_path / "between")
        found = [await said(dispatch)]
        for step in range(5):
            await trainers.train_step(judged_batch(step))
            found.append(await said(dispatch))
            if step == 2:
                await trainers.save(state)
        return found

    async def resumed(dispatch: WorkerDispatch) -> Any:
        trainers = algorithm_over(dispatch, algorithm, settings, tmp_path / "between")
        found = [await said(dispatch)]
        await trainers.train_step(judged_batch(3))
        return [*found, await said(dispatch)]

    found = run(roles(), train)
    became = [
        next(at for at, (policy, _) in enumerate(found) if torch.equal(policy, reference)) for _, reference in found
    ]
    assert became == [0, 0, 2, 2, 4, 4]
    assert not torch.equal(found[2][0], found[0][0])
    again = run(roles(state), resumed)
    for before, after in zip(again, found[3:5], strict=True):
        assert [*map(torch.equal, before, after)] == [True, True]
    assert not (tmp_path / "between").exists()


def test_dpo_learns_what_it_is_shown_also_in_several_micro_batches_of_pairs(models: dict[str, Path]) -> None:
    rng = random.Random(0)
    sequences = [
        TokenSequence.of_completion([row, 2], [rng.randrange(4, VOCAB) for _ in range(3)]) for row in range(4, 16)
    ]
    pairs = TokenBatch(tuple(sequences), sequences_per_unit=2)
    trainer = TRAINER.model_copy(update={"micro_batch_tokens": 24})  # 3 of the 6 pairs
    roles = [
        RoleSpec(POLICY, trainer, models["qwen3-untied"], {OBJECTIVE: dpo(beta=0.5)}),
        RoleSpec(REFERENCE, TRAINER.model_copy(update={"frozen": True}), models["qwen3-untied"]),
    ]

    async def prefer(dispatch: WorkerDispatch) -> Any:
        return [await dpo_step(dispatch, pairs) for _ in range(3)]

    reports = in_dispatch(roles, prefer)
    assert reports[0].metrics["reward_margin"] == pytest.approx(0.0, abs=1e-5)
    assert reports[0].metrics["loss"] == pytest.approx(math.log(2), rel=1e-5)
    assert reports[-1].metrics["reward_accuracy"] == 1.0
    assert reports[-1].metrics["loss"] < 0.5 * reports[0].metrics["loss"]


def test_roles_that_cannot_be_are_refused_before_anything_starts_and_only_the_policy_has_an_adapter(
    models: dict[str, Path],
) -> None:
    algorithm, nothing = AlgorithmConfig(objective="ppo", kl_coefficient=0.1), (CriticConfig(), ReferenceConfig())
    check_roles(algorithm, TrainerConfig(), CriticConfig(ranks=2), ReferenceConfig(ranks=1))
    for refused, says in (
        ((AlgorithmConfig(), TrainerConfig(head="value")), r"trainer\.head = value, and could not generate"),
        (
            (AlgorithmConfig(kl_coefficient=0.1), TrainerConfig(), CriticConfig(ranks=1)),
            r'only a run with .* "ppo" has a critic',
        ),
        (
            (AlgorithmConfig(objective="ppo"), TrainerConfig(), CriticConfig(), ReferenceConfig(ranks=1)),
            r"reference\.ranks is 1, and only a run with algorithm\.kl_coefficient above 0",
        ),
    ):
        with pytest.raises(ConfigError, match=says):
            check_roles(*refused)
    split = TrainerConfig(device="cpu", ranks=4, fsdp2={"tensor_parallel": 2})
    both = dict.fromkeys((POLICY, CRITIC), models["qwen3-untied"])
    check_models(both, split, *nothing, here=True)
    with pytest.raises(
        ConfigError, match=r"critic\.ranks is 3, with which .* critic\.ranks is 3, which trainer\.fsdp2"
    ):
        check_models(both, split, CriticConfig(ranks=3), ReferenceConfig(), here=True)
    groups = rank_groups(algorithm, split, CriticConfig(ranks=2), ReferenceConfig())
    assert {name: (group.ranks, group.head) for name, group in groups.items()} == {
        "trainer": (4, "tokens"),
        "critic": (2, "value"),
    }
    trainer, objective = TrainerConfig(lora=LoraConfig()), Objective(policy_objective(algorithm))
    specs = role_specs(algorithm, trainer, CriticConfig(), {POLICY: Path()}, objective)
    found = {spec.name: TrainerConfig.model_validate(spec.config.model_dump()).lora is not None for spec in specs}
    assert found == {POLICY: True, CRITIC: False, REFERENCE: False}
