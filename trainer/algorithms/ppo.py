"""PPO: the critic's values give every token an advantage, and policy and critic are trained on the same batches."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from weightlane.ckpt_engines import GradientError

from ..data.batch import LossDenominators, MiniBatch, TokenBatch
from ..data.sequences import IGNORED, TokenSequence
from ..data.step_result import StepResult
from ..dispatch.dispatch import WorkerDispatch
from ..objectives.advantages import gae, whiten
from ..objectives.config import AlgorithmConfig
from ..objectives.loss import OutputName
from ..objectives.policy_values import ADVANTAGES, REFERENCE_LOGPROBS, REWARD, ROLLOUT_LOGPROBS
from ..objectives.reference_kl import kl_estimate, kl_penalised_rewards
from ..objectives.value import OLD_VALUES, RETURNS, explained_variance
from .policy_gradient import PolicyGradient, ReferenceRefresh
from .roles import CRITIC, OBJECTIVE, REFERENCE
from .step import take_step

_MOST_SKIPS = 10
"""Consecutive updates with a critic gradient that is not finite after which `Ppo.train_step` raises `GradientError`."""
_CRITIC = f"{CRITIC}/"
"""Prefix of the names of the critic's metrics."""
_VALUES: tuple[OutputName, ...] = ("values",)


class Ppo(PolicyGradient):
    """PPO (arXiv 1707.06347) with generalised advantage estimation; both models take the same optimizer steps on a batch.

    The reward of a completion is given at its last token. With a `REFERENCE`, the KL penalty of every token is part of the
    rewards, not of the loss. Advantages are scaled to mean 0 and standard deviation 1 over the batch. A completion that was cut
    off is treated like one that ended.

    Args:
        dispatch: Has the roles `POLICY` and `CRITIC`, each with the loss `OBJECTIVE`, and maybe `REFERENCE`.
        config: Discount, lambda, the KL penalty's coefficient, and how often a batch is trained on.
        refresh: Refreshes the reference; None leaves it as it is.
    """

    def __init__(
        self, dispatch: WorkerDispatch, config: AlgorithmConfig, refresh: ReferenceRefresh | None = None
    ) -> None:
        super().__init__(dispatch, config, refresh)
        self._critic = dispatch[CRITIC]
        self._critic_skips = 0

    async def train_step(self, batch: TokenBatch, mini_batches: Sequence[MiniBatch] = ()) -> StepResult:
        """See `PolicyGradient.train_step`. The critic's metrics, with ``explained_variance``, are named ``critic/...``.

        The critic takes its step even if the policy's gradient is not finite. Raises `GradientError` if the critic's own
        gradient was not finite in `_MOST_SKIPS` consecutive updates.
        """
        result = await super().train_step(batch, mini_batches)
        critic = {
            name.removeprefix(_CRITIC): value for name, value in result.metrics.items() if name.startswith(_CRITIC)
        }
        if not math.isfinite(explained := explained_variance(critic)):  # all returns are equal
            return result
        return replace(result, metrics={**result.metrics, f"{_CRITIC}explained_variance": explained})

    async def _judged(self, batch: TokenBatch, *, own: str | None) -> TokenBatch:
        # The policy is asked last: where roles take turns on a device, it is there for its step.
        valuing = self._critic.forward(batch, _VALUES)
        judged, valued = await asyncio.gather(super()._judged(batch, own=own), valuing)
        return with_advantages(judged, [outputs["values"] for outputs in valued], self._config)

    async def _update(self, batch: TokenBatch, denominators: LossDenominators) -> StepResult:
        policy, critic = await asyncio.gather(
            super()._update(batch, denominators), take_step(self._critic, batch, OBJECTIVE, denominators)
        )
        metrics = {f"{_CRITIC}{name}": value for name, value in critic.metrics.items()}
        if REFERENCE in self._dispatch:
            metrics["reference_kl"] = _reference_kl(batch)
        metrics |= {f"{_CRITIC}grad_norm": critic.grad_norm, f"{_CRITIC}skipped": float(bool(critic.skipped))}
        self._critic_skips = self._critic_skips + 1 if critic.skipped else 0
        if self._critic_skips >= _MOST_SKIPS:
            raise GradientError(
                f"the critic took no step in {_MOST_SKIPS} updates in a row: {critic.skipped}",
                part="ppo",
                hint="Lower critic.learning_rate, or begin with another critic.",
            )
        took, in_turns = (policy.seconds, critic.seconds), self._critic.spec.group == self._policy.spec.group
        return replace(policy, metrics={**policy.metrics, **metrics}, seconds=sum(took) if in_turns else max(took))

    def state_paths(self, directory: Path) -> list[Path]:
        """See `PolicyGradient.state_paths`."""
        return [*super().state_paths(directory), critic_state(directory)]

    async def save(self, directory: Path) -> None:
        """See `PolicyGradient.save`. The critic's state is saved next to the policy's."""
        await asyncio.gather(super().save(directory), self._critic.save(critic_state(directory)))

    async def load(self, directory: Path, *, optimizer: bool = True) -> int:
        """See `PolicyGradient.load`. The critic's state is loaded, too."""
        critic = self._critic.load(critic_state(directory), optimizer=optimizer)
        steps, _ = await asyncio.gather(super().load(directory, optimizer=optimizer), critic)
        return steps


def critic_state(policy_state: Path) -> Path:
    """The directory of the critic's state, next to the policy's."""
    return policy_state.with_name(CRITIC)


def with_advantages(batch: TokenBatch, values: Sequence[torch.Tensor], config: AlgorithmConfig) -> TokenBatch:
    """`batch` with `ADVANTAGES`, `RETURNS` and `OLD_VALUES`.

    Args:
        batch: Sequences with `REWARD`, `ROLLOUT_LOGPROBS` and, for a penalty, `REFERENCE_LOGPROBS`.
        values: The critic's values, float32 [T] for each sequence.
        config: Discount, lambda, and the penalty's coefficient. The penalty's estimator is k1, the right one in rewards.
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
    """The k3 estimate of the KL divergence from the reference to the sampling policy, mean over targets."""
    packed = batch.packed
    drawn, reference = (packed.per_token[name][packed.mask] for name in (ROLLOUT_LOGPROBS, REFERENCE_LOGPROBS))
    return float(kl_estimate(drawn, reference, "k3").mean()) if len(drawn) else 0.0


def _rewards(sequence: TokenSequence, mask: torch.Tensor, config: AlgorithmConfig) -> torch.Tensor:
    """The reward of each target with its KL penalty: float32 [targets]."""
    drawn = sequence.per_token[ROLLOUT_LOGPROBS][mask]
    reference = sequence.per_token.get(REFERENCE_LOGPROBS)
    return kl_penalised_rewards(
        sequence.per_sequence[REWARD],
        drawn,
        drawn if reference is None else reference[mask],
        coefficient=config.kl_coefficient,
    )
