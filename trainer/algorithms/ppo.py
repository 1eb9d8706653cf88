"""PPO: a critic's values make an advantage of every token, and both models are trained on the same batch."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from weightlane.ckpt_engines import GradientError

from ..config import AlgorithmConfig
from ..data.batch import LossDenominators, TokenBatch
from ..data.sequences import IGNORED, TokenSequence
from ..data.step_result import StepResult
from ..dispatch.dispatch import WorkerDispatch
from ..objectives.advantages import gae, whiten
from ..objectives.loss import OutputName
from ..objectives.policy_values import ADVANTAGES, REFERENCE_LOGPROBS, REWARD, ROLLOUT_LOGPROBS
from ..objectives.reference_kl import kl_estimate, kl_penalised_rewards
from ..objectives.value import OLD_VALUES, RETURNS, explained_variance
from .policy_gradient import PolicyGradient
from .roles import CRITIC, OBJECTIVE, REFERENCE
from .step import take_step, with_reference

_MOST_SKIPS = 10
"""Batches in a row on which a critic's gradient may be no number."""
_VALUES: tuple[OutputName, ...] = ("values",)


class Ppo(PolicyGradient):
    """PPO (arXiv 1707.06347) with generalised advantage estimation; one optimizer step of both models for a batch.

    The reward of a completion counts at its last token; with a `REFERENCE`, every token is penalised for leaving it, in the
    rewards and not in the loss. Advantages are scaled to mean 0 and standard deviation 1 over the batch. A completion that was
    cut off counts as one that ended.

    Args:
        dispatch: Has the roles `POLICY` and `CRITIC`, each with the loss `OBJECTIVE`, and maybe `REFERENCE`.
        config: Discount, lambda, and the KL penalty's coefficient.
    """

    def __init__(self, dispatch: WorkerDispatch, config: AlgorithmConfig) -> None:
        super().__init__(dispatch)
        self._critic, self._config = dispatch[CRITIC], config
        self._critic_skips = 0

    async def train_step(self, batch: TokenBatch, denominators: LossDenominators | None = None) -> StepResult:
        """See `PolicyGradient.train_step`. The critic's metrics are there as ``critic/...``, and its ``explained_variance``.

        It takes a step also where the policy's gradient is no number. Raises `GradientError` when its own was none for long.
        """
        valuing = self._critic.forward(batch, _VALUES)
        if REFERENCE in self._dispatch:
            batch = await with_reference(batch, self._dispatch[REFERENCE])
        values = [outputs["values"] for outputs in await valuing]
        judged = with_advantages(batch, values, self._config)
        policy, critic = await asyncio.gather(
            take_step(self._policy, judged, OBJECTIVE, denominators),
            take_step(self._critic, judged, OBJECTIVE, denominators),
        )
        metrics = {f"critic/{name}": value for name, value in critic.metrics.items()}
        if REFERENCE in self._dispatch:
            metrics["reference_kl"] = _reference_kl(judged)
        metrics |= {"critic/grad_norm": critic.grad_norm, "critic/skipped": float(bool(critic.skipped))}
        self._critic_skips = self._critic_skips + 1 if critic.skipped else 0
        if self._critic_skips >= _MOST_SKIPS:
            raise GradientError(
                f"the critic took no step on {_MOST_SKIPS} batches in a row: {critic.skipped}",
                part="ppo",
                hint="Lower critic.learning_rate, or begin with another critic.",
            )
        if math.isfinite(explained := explained_variance(critic.metrics)):  # it isn't where all returns are equal
            metrics["critic/explained_variance"] = explained
        seconds = policy.seconds + critic.seconds
        return replace(policy, metrics={**policy.metrics, **metrics}, seconds=seconds)

    async def save(self, directory: Path) -> None:
        """See `PolicyGradient.save`; the critic's state lies beside that of the policy."""
        await asyncio.gather(super().save(directory), self._critic.save(critic_state(directory)))

    async def load(self, directory: Path, *, optimizer: bool = True) -> int:
        """See `PolicyGradient.load`; the critic resumes, too."""
        critic = self._critic.load(critic_state(directory), optimizer=optimizer)
        steps, _ = await asyncio.gather(super().load(directory, optimizer=optimizer), critic)
        return steps


def critic_state(policy_state: Path) -> Path:
    """The directory of the critic's state, beside that of the policy."""
    return policy_state.with_name(CRITIC)


def with_advantages(batch: TokenBatch, values: Sequence[torch.Tensor], config: AlgorithmConfig) -> TokenBatch:
    """`batch` with `ADVANTAGES`, `RETURNS` and `OLD_VALUES`.

    Args:
        batch: Sequences with `REWARD`, `ROLLOUT_LOGPROBS` and, for a penalty, `REFERENCE_LOGPROBS`.
        values: float32 [T] for each sequence: the critic's.
        config: Discount, lambda, and the penalty's coefficient; its estimator is k1, which is right in rewards.
    """
    advantages, returns = [], []
    for sequence, value in zip(batch.sequences, values, strict=True):
        mask = sequence.targets != IGNORED
        advantage, wanted = torch.zeros_like(value), torch.zeros_like(value)
        if bool(mask.any()):
            found = gae(_rewards(sequence, mask, config), value[mask], gamma=config.gamma, lam=config.gae_lambda)
            advantage[mask], wanted[mask] = found
        advantages.append(advantage)
        returns.append(wanted)
    whitened = batch.packed.split(whiten(torch.cat(advantages), batch.packed.mask))
    judged = batch.with_values(ADVANTAGES, whitened).with_values(RETURNS, returns)
    return judged.with_values(OLD_VALUES, values)


def _reference_kl(batch: TokenBatch) -> float:
    """The mean estimate k3 of the KL from the reference to the policy that sampled, over targets."""
    packed = batch.packed
    drawn, reference = (packed.per_token[name][packed.mask] for name in (ROLLOUT_LOGPROBS, REFERENCE_LOGPROBS))
    return float(kl_estimate(drawn, reference, "k3").mean()) if len(drawn) else 0.0


def _rewards(sequence: TokenSequence, mask: torch.Tensor, config: AlgorithmConfig) -> torch.Tensor:
    """float32 [targets]."""
    drawn = sequence.per_token[ROLLOUT_LOGPROBS][mask]
    reference = sequence.per_token.get(REFERENCE_LOGPROBS)
    return kl_penalised_rewards(
        sequence.per_sequence[REWARD],
        drawn,
        drawn if reference is None else reference[mask],
        coefficient=config.kl_coefficient,
        estimator="k1",
    )
