"""Algorithms over roles on the policy's ranks and on ranks of their own, in float64, bit for bit, and on the time line."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from engine_ranks import Teams, case, exhaustive, megatron
from judged_batches import TRAINER, judged_batch
from local_dispatch import in_dispatch, team_groups
from trace_format import load
from transformers import AutoModelForCausalLM, AutoModelForTokenClassification
from waiting import HANG_S, MovableClock

from weightlane.ckpt_engines import ProtocolError
from weightlane.plugins import make_hooks
from weightlane.plugins.trace.merge import merge
from weightlane.plugins.trace.observer import TraceObserver
from weightlane.trainer import (
    AlgorithmConfig,
    LossDenominators,
    MiniBatch,
    Objective,
    TokenBatch,
    TokenSequence,
    TrainerConfig,
    gae,
)
from weightlane.trainer.algorithms.composition import algorithm_over, policy_objective, role_names, role_specs
from weightlane.trainer.algorithms.roles import CRITIC, POLICY, REFERENCE
from weightlane.trainer.data.sequences import IGNORED
from weightlane.trainer.dispatch import rank_worker
from weightlane.trainer.dispatch.dispatch import WorkerDispatch
from weightlane.trainer.engines.fsdp2.engine import Fsdp2Engine
from weightlane.trainer.objectives.config import CriticConfig, ReferenceConfig
from weightlane.trainer.objectives.policy_values import ADVANTAGES, REWARD, ROLLOUT_LOGPROBS


def oracle(
    paths: dict[str, Path], batch: TokenBatch, parts: list[tuple[range, LossDenominators]], config: AlgorithmConfig
) -> Any:
    """Log-probabilities and values of `batch` after training: transformers and torch's AdamW in float64, a sequence at a time."""
    options = {"dtype": torch.float64, "attn_implementation": "eager"}
    policy, reference = (
        AutoModelForCausalLM.from_pretrained(paths[role], **options).eval() for role in (POLICY, REFERENCE)
    )
    critic = AutoModelForTokenClassification.from_pretrained(paths[CRITIC], **options).eval()
    optimizers = [torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.0) for model in (policy, critic)]

    def logprobs_by(model: Any, sequence: TokenSequence) -> torch.Tensor:
        logs = torch.log_softmax(model(sequence.tokens[None]).logits[0], -1)
        chosen = logs.gather(1, sequence.targets.clamp(min=0)[:, None])[:, 0]
        return torch.as_tensor(chosen[sequence.targets != IGNORED])

    def outputs(sequence: TokenSequence) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        there = sequence.targets != IGNORED
        return logprobs_by(policy, sequence), critic(sequence.tokens[None]).logits[0, there, 0], there

    with torch.no_grad():
        before = [outputs(sequence)[:2] for sequence in batch.sequences]
        kept_logprobs = [logprobs_by(reference, sequence) for sequence in batch.sequences]
    judged = []
    for sequence, kept_one, (_, values) in zip(batch.sequences, kept_logprobs, before, strict=True):
        drawn = sequence.per_token[ROLLOUT_LOGPROBS][sequence.targets != IGNORED]
        rewards = -config.kl_coefficient * (drawn - kept_one)
        rewards[-1] += sequence.per_sequence[REWARD]
        judged.append(gae(rewards, values, gamma=config.gamma, lam=config.gae_lambda))
    whole = torch.cat([advantages for advantages, _ in judged])
    for rows, denominators in parts * config.epochs:
        for optimizer in optimizers:
            optimizer.zero_grad()
        for row in rows:
            sequence, (advantages, returns) = batch.sequences[row], judged[row]
            logprobs, values, there = outputs(sequence)
            if config.objective == "ppo":
                advantages, pull = (advantages - whole.mean()) / whole.std(correction=0), torch.zeros(())
            else:
                advantages = sequence.per_token[ADVANTAGES][there]
                pull = config.kl_coefficient * ((logprobs - kept_logprobs[row]) ** 2).sum() / 2
            weight = (
                (before[row][0] - sequence.per_token[ROLLOUT_LOGPROBS][there]).exp().clamp(max=config.importance_cap)
            )
            ratio = (logprobs - before[row][0]).exp()
            clipped = ratio.clamp(1 - config.clip_low, 1 + config.clip_high)
            loss = pull - (weight * torch.minimum(ratio * advantages, clipped * advantages)).sum()
            near = before[row][1] + (values - before[row][1]).clamp(-config.value_clip, config.value_clip)
            loss = loss + torch.maximum((values - returns) ** 2, (near - returns) ** 2).sum() / 2
            (loss / denominators.tokens).backward()
        for optimizer in optimizers:
            optimizer.step()
    with torch.no_grad():
        after = [outputs(sequence)[:2] for sequence in batch.sequences]
    return [torch.cat([each[index] for each in found]) for index in range(2) for found in (before, after)]


ALONE = {"critic": 1, "reference": 1}
"""Ranks that roles have for themselves."""


@pytest.mark.parametrize(
    ("objective", "settings", "own"),
    [
        case("ppo", {}, ALONE, id="ppo, fsdp2"),
        exhaustive("grpo", {}, {"reference": 1}, id="grpo, fsdp2"),
        exhaustive("ppo", megatron({"tensor_parallel": 2}, ranks=2), {}, id="ppo, megatron, tp2"),
        exhaustive(
            "ppo",
            megatron({"tensor_parallel": 2}, ranks=2),
            {"critic": 2, "reference": 2},
            id="ppo, megatron, tp2 each",
        ),
        exhaustive("grpo", megatron({"pipeline_parallel": 2}, ranks=2), {"reference": 2}, id="grpo, megatron, pp2"),
        exhaustive("ppo", megatron({"distributed_optimizer": True}, ranks=2), ALONE, id="ppo, megatron, dp2 and 1"),
        exhaustive("ppo", {"ranks": 2}, ALONE, id="ppo, fsdp2 on 2, others on 1"),
    ],
)
def test_several_updates_on_a_batch_are_those_of_one_process_in_float64_whatever_ranks_the_roles_are_on(
    teams: Teams, objective: str, settings: dict[str, Any], own: dict[str, int]
) -> None:
    """Two epochs of two mini-batches, one with a sequence that was left out: clips bind, and none of the sums is the batch's.

    Roles on the policy's ranks compute the same bits as on as many ranks of their own.
    """
    models, batch = teams.models, judged_batch(0)
    paths = {POLICY: models["qwen3-untied"], CRITIC: models["qwen3-critic"], REFERENCE: models["qwen3-tied"]}
    algorithm = AlgorithmConfig(
        objective=objective,
        epochs=2,
        proximal="trainer",
        value_clip=0.02,
        clip_low=0.02,
        clip_high=0.03,
        ratio_cap=2.0,
        kl_coefficient=0.1,
    )
    parts = [(range(3), LossDenominators(20.0, 4.0)), (range(3, 8), LossDenominators.of_sequences(batch.sequences[3:]))]
    before, expected, values_before, expected_values = oracle(paths, batch, parts, algorithm)

    async def train(dispatch: WorkerDispatch) -> Any:
        trainers = algorithm_over(dispatch, algorithm)
        mini_batches = [MiniBatch(len(rows), denominators) for rows, denominators in parts]
        with pytest.raises(ProtocolError, match="mini-batches have 3 sequences, and the batch has 8"):
            await trainers.train_step(batch, mini_batches[:1])
        result = await trainers.train_step(batch, mini_batches)
        outputs = await dispatch[POLICY].forward(batch)
        valued = await dispatch[CRITIC].forward(batch, ("values",)) if CRITIC in dispatch else []
        return result, [each["logprobs"] for each in outputs], [each["values"] for each in valued]

    trainer = TrainerConfig(
        **{**TRAINER.model_dump(), "max_grad_norm": 1e6, "collective_timeout_s": HANG_S, **settings}
    )
    mask, found = batch.packed.mask, []
    for ranks in [{}, own] if own else [{}]:
        critic = CriticConfig(learning_rate=3e-3, ranks=ranks.get(CRITIC, 0))
        reference = ReferenceConfig(ranks=ranks.get(REFERENCE, 0))
        specs = role_specs(algorithm, trainer, critic, paths, Objective(policy_objective(algorithm)), reference)
        assert {spec.name for spec in specs if spec.group != "trainer"} == ranks.keys()
        with team_groups(teams, specs) if settings else nullcontext() as groups:
            result, logprobs, values = in_dispatch(specs, train, groups)
        found.append((result.metrics, result.grad_norm, *logprobs, *values))
        assert result.step == 4
        assert 0.0 < result.metrics["clip_fraction"] < 1.0
        torch.testing.assert_close(torch.cat(logprobs)[mask].double(), expected, atol=2e-5, rtol=0)
        assert (expected - before).abs().max() > 0.2
        if objective == "ppo":
            assert result.metrics["critic/value_clip_fraction"] > 0.0
            torch.testing.assert_close(torch.cat(values)[mask].double(), expected_values, atol=2e-5, rtol=0)
            assert (expected_values - values_before).abs().max() > 0.02
    if own and set(own.values()) == {trainer.ranks}:
        for left, right in zip(*found, strict=True):
            assert torch.equal(left, right) if isinstance(left, torch.Tensor) else left == right


def after(barrier: threading.Barrier, method: Callable[..., Any]) -> Callable[..., Any]:
    """`method`, whose calls wait for each other at `barrier` first."""

    def meet(*call: Any) -> Any:
        barrier.wait()
        return method(*call)

    return meet


def test_roles_on_ranks_of_their_own_compute_at_the_same_time_as_the_time_line_shows(
    models: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every call waits until those of the other roles have begun, and only then does time pass."""
    clock, path = MovableClock(), tmp_path / "trace.json"
    for module in ("observer", "part"):
        monkeypatch.setattr(f"weightlane.plugins.trace.{module}.now_us", lambda: round(1e6 * clock()))
    monkeypatch.setattr(rank_worker, "time", SimpleNamespace(perf_counter=clock))
    hooks = make_hooks([TraceObserver(path)])
    monkeypatch.setattr(rank_worker, "process_hooks", lambda: hooks)
    for method, roles in (("forward", 3), ("forward_backward", 2)):
        together = threading.Barrier(roles, lambda: clock.advance(1.0), HANG_S)

        monkeypatch.setattr(Fsdp2Engine, method, after(together, getattr(Fsdp2Engine, method)))
    algorithm = AlgorithmConfig(objective="ppo", kl_coefficient=0.1, epochs=2, proximal="trainer")
    paths, objective = (
        dict.fromkeys(role_names(algorithm), models["qwen3-untied"]),
        Objective(policy_objective(algorithm)),
    )
    critic, reference = CriticConfig(ranks=1), ReferenceConfig(ranks=1)

    async def train(dispatch: WorkerDispatch) -> None:
        result = await algorithm_over(dispatch, algorithm).train_step(judged_batch(0))
        assert (result.step, result.seconds) == (2, 2.0)

    in_dispatch(role_specs(algorithm, TRAINER, critic, paths, objective, reference), train)
    merge(path)
    trace = load(path)
    at = {event["name"]: (event["ts"], event["dur"]) for event in trace.events if event["ph"] == "X"}
    second = 1_000_000
    for name, start, roles in (
        ("forward", 0, (POLICY, CRITIC, REFERENCE)),
        ("step 1", second, (POLICY, CRITIC)),
        ("step 2", 2 * second, (POLICY, CRITIC)),
    ):
        assert {at[f"{role}: {name}"] for role in roles} == {(start, second)}
    (process,) = trace.processes.values()
    assert sorted(process.split(", ")) == ["critic-0", "reference-0", "trainer-0"]
