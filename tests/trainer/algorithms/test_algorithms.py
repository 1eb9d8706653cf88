"""Algorithms over a dispatch with real engines in this process."""

from __future__ import annotations

import math
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from engine_batches import VOCAB
from local_dispatch import in_dispatch
from transformers import AutoModelForCausalLM, AutoModelForTokenClassification

from weightlane.ckpt_engines import ConfigError, ProtocolError
from weightlane.trainer import (
    AlgorithmConfig,
    LossDenominators,
    MiniBatch,
    Objective,
    TokenBatch,
    TokenSequence,
    TrainerConfig,
    dpo,
    gae,
)
from weightlane.trainer.algorithms.composition import (
    algorithm_over,
    check_roles,
    policy_objective,
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

TRAINER = TrainerConfig(device="cpu", learning_rate=3e-3, max_grad_norm=10.0)


def judged_batch(seed: int, rows: int = 8) -> TokenBatch:
    """Completions whose reward is the share of small tokens in them; the first target of each doesn't count."""
    rng = random.Random(seed)
    sequences = []
    for _ in range(rows):
        completion = [rng.randrange(VOCAB) for _ in range(rng.randint(2, 6))]
        sequences.append(
            TokenSequence.of_completion(
                [rng.randrange(VOCAB) for _ in range(3)],
                completion,
                masked=1,
                per_token={ROLLOUT_LOGPROBS: [-rng.uniform(3.5, 4.5) for _ in completion], ADVANTAGES: rng.gauss(0, 1)},
                per_sequence={REWARD: sum(token < VOCAB // 2 for token in completion) / len(completion)},
            )
        )
    return TokenBatch(tuple(sequences))


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


def oracle(path: Path, batch: TokenBatch, parts: list[tuple[range, LossDenominators]], config: AlgorithmConfig) -> Any:
    """Log-probabilities and values of `batch` after training: transformers and torch's AdamW in float64, a sequence at a time."""
    options = {"dtype": torch.float64, "attn_implementation": "eager"}
    policy = AutoModelForCausalLM.from_pretrained(path, **options).eval()
    critic = AutoModelForTokenClassification.from_pretrained(path, num_labels=1, **options).eval()
    torch.nn.init.zeros_(critic.score.weight)
    if critic.score.bias is not None:
        torch.nn.init.zeros_(critic.score.bias)
    optimizers = [torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.0) for model in (policy, critic)]

    def outputs(sequence: TokenSequence) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        there = sequence.targets != IGNORED
        logs = torch.log_softmax(policy(sequence.tokens[None]).logits[0], -1)
        chosen = logs.gather(1, sequence.targets.clamp(min=0)[:, None])[:, 0]
        return chosen[there], critic(sequence.tokens[None]).logits[0, there, 0], there

    with torch.no_grad():
        before = [outputs(sequence)[:2] for sequence in batch.sequences]
    rewards = []
    for sequence, (logprobs, _) in zip(batch.sequences, before, strict=True):
        rewards.append(torch.zeros_like(logprobs))
        rewards[-1][-1] = sequence.per_sequence[REWARD]
    judged = [
        gae(each, values, gamma=config.gamma, lam=config.gae_lambda)
        for each, (_, values) in zip(rewards, before, strict=True)
    ]
    whole = torch.cat([advantages for advantages, _ in judged])
    for rows, denominators in parts * config.epochs:
        for optimizer in optimizers:
            optimizer.zero_grad()
        for row in rows:
            sequence, (advantages, returns) = batch.sequences[row], judged[row]
            logprobs, values, there = outputs(sequence)
            if config.objective == "ppo":
                advantages = (advantages - whole.mean()) / whole.std(correction=0)
            else:
                advantages = sequence.per_token[ADVANTAGES][there]
            weight = (
                (before[row][0] - sequence.per_token[ROLLOUT_LOGPROBS][there]).exp().clamp(max=config.importance_cap)
            )
            ratio = (logprobs - before[row][0]).exp()
            clipped = ratio.clamp(1 - config.clip_low, 1 + config.clip_high)
            loss = -(weight * torch.minimum(ratio * advantages, clipped * advantages)).sum()
            near = before[row][1] + (values - before[row][1]).clamp(-config.value_clip, config.value_clip)
            loss = loss + torch.maximum((values - returns) ** 2, (near - returns) ** 2).sum() / 2
            (loss / denominators.tokens).backward()
        for optimizer in optimizers:
            optimizer.step()
    with torch.no_grad():
        after = [outputs(sequence)[:2] for sequence in batch.sequences]
    return [torch.cat([each[index] for each in found]) for index in range(2) for found in (before, after)]


@pytest.mark.parametrize("objective", ["ppo", "grpo"])
def test_several_updates_on_a_batch_are_those_of_one_process_in_float64(
    objective: str, models: dict[str, Path]
) -> None:
    """Two epochs of two mini-batches, one with a sequence that was left out: clips bind, and none of the sums is the batch's."""
    model, batch = models["qwen3-untied"], judged_batch(0)
    algorithm = AlgorithmConfig(
        objective=objective, epochs=2, proximal="trainer", value_clip=0.02, clip_low=0.02, clip_high=0.03, ratio_cap=2.0
    )
    parts = [(range(3), LossDenominators(20.0, 4.0)), (range(3, 8), LossDenominators.of_sequences(batch.sequences[3:]))]
    before, expected, values_before, expected_values = oracle(model, batch, parts, algorithm)

    async def train(dispatch: WorkerDispatch) -> Any:
        trainers = algorithm_over(dispatch, algorithm)
        mini_batches = [MiniBatch(len(rows), denominators) for rows, denominators in parts]
        with pytest.raises(ProtocolError, match="mini-batches have 3 sequences, and the batch has 8"):
            await trainers.train_step(batch, mini_batches[:1])
        result = await trainers.train_step(batch, mini_batches)
        outputs = await dispatch[POLICY].forward(batch)
        valued = await dispatch[CRITIC].forward(batch, ("values",)) if CRITIC in dispatch else []
        return result, [each["logprobs"] for each in outputs], [each["values"] for each in valued]

    trainer = TRAINER.model_copy(update={"max_grad_norm": 1e6})
    specs = role_specs(
        algorithm,
        trainer,
        CriticConfig(learning_rate=3e-3),
        dict.fromkeys((POLICY, CRITIC), model),
        Objective(algorithm),
    )
    result, logprobs, values = in_dispatch(specs, train)
    mask = batch.packed.mask
    assert result.step == 4
    assert 0.0 < result.metrics["clip_fraction"] < 1.0
    torch.testing.assert_close(torch.cat(logprobs)[mask].double(), expected, atol=2e-5, rtol=0)
    assert (expected - before).abs().max() > 0.2
    if objective == "ppo":
        assert result.metrics["critic/value_clip_fraction"] > 0.0
        torch.testing.assert_close(torch.cat(values)[mask].double(), expected_values, atol=2e-5, rtol=0)
        assert (expected_values - values_before).abs().max() > 0.02


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


def test_a_reference_becomes_the_policy_every_few_batches_and_goes_on_where_it_was_saved(
    models: dict[str, Path], tmp_path: Path
) -> None:
    algorithm = AlgorithmConfig(objective="grpo", kl_coefficient=0.1, epochs=2)
    paths, settings = dict.fromkeys((POLICY, REFERENCE), models["qwen3-untied"]), ReferenceConfig(refresh_every=2)
    batch, state = judged_batch(0), tmp_path / "state" / "trainer"
    state.parent.mkdir()

    def roles(state: Path | None = None) -> list[RoleSpec]:
        objective = Objective(policy_objective(algorithm))
        return role_specs(algorithm, TRAINER, CriticConfig(), paths, objective, settings, state=state)

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

    found = in_dispatch(roles(), train)
    became = [
        next(at for at, (policy, _) in enumerate(found) if torch.equal(policy, reference)) for _, reference in found
    ]
    assert became == [0, 0, 2, 2, 4, 4]
    assert not torch.equal(found[2][0], found[0][0])
    again = in_dispatch(roles(state), resumed)
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


def test_roles_that_cannot_be_are_refused_before_anything_starts_and_only_the_policy_has_an_adapter() -> None:
    algorithm = AlgorithmConfig(objective="ppo", kl_coefficient=0.1)
    check_roles(AlgorithmConfig(), TrainerConfig(engine="megatron"))
    check_roles(algorithm, TrainerConfig())
    with pytest.raises(ConfigError, match=r"trainer\.head = value, and could not generate"):
        check_roles(AlgorithmConfig(), TrainerConfig(head="value"))
    for needs_others in (AlgorithmConfig(objective="ppo"), AlgorithmConfig(kl_coefficient=0.1)):
        with pytest.raises(ConfigError, match=r"the megatron engine hosts one.*Set trainer\.engine = fsdp2"):
            check_roles(needs_others, TrainerConfig(engine="megatron"))
    trainer, objective = TrainerConfig(lora=LoraConfig()), Objective(policy_objective(algorithm))
    specs = role_specs(algorithm, trainer, CriticConfig(), {POLICY: Path()}, objective)
    found = {spec.name: TrainerConfig.model_validate(spec.config.model_dump()).lora is not None for spec in specs}
    assert found == {POLICY: True, CRITIC: False, REFERENCE: False}
