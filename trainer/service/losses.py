"""Losses of the Tinker API by name, as its public documentation defines them: sums over tokens.

Sources, read on 2026-11-26: the pages of https://tinker-docs.thinkingmachines.ai/tinker/losses, one for each loss, and for the
defaults of the thresholds the notebook ``tutorials/202_loss_functions.py`` of github.com/thinking-machines-lab/tinker-cookbook
(Apache-2.0, commit 9dfcc3a).

Inputs are named as there: ``logprobs`` are those of the policy that sampled, ``q`` below; ``p`` is the model's own
log-probability, ``A`` the advantage and ``r = exp(p - q)``. ``weights``, 1 where there are none, multiply the loss of a token
everywhere; the documentation has them only for cross_entropy. All inputs have the shape of the targets, [N] or [N, K].
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from weightlane.ckpt_engines import ConfigError, ProtocolError

from ..data.batch import LossDenominators, TokenBatch
from ..data.sequences import IGNORED, MicroBatch
from ..objectives.loss import LossOutput, LossSums, LossTerm, ModelOutputs
from ..objectives.policy_values import LARGEST_LOG_RATIO, ratio_of

_PART = "loss"
_LOW, _HIGH = "clip_low_threshold", "clip_high_threshold"
_LOGPROBS, _ADVANTAGES, _WEIGHTS, _RATIO_MASK = "logprobs", "advantages", "weights", "sequence_ratio_mask"
_BETA = "beta"
_POLICY = (_LOGPROBS, _ADVANTAGES)


@dataclass(frozen=True, slots=True)
class _Tokens:
    """The tokens of a micro-batch as a policy's loss sees them. Tensors are [N] or [N, K]."""

    micro: MicroBatch
    logprobs: torch.Tensor
    """The model's, with gradient."""
    rollout_logprobs: torch.Tensor
    advantages: torch.Tensor
    counted: torch.Tensor
    """bool: a target whose weight is not 0."""
    settings: Mapping[str, float]

    @property
    def log_ratio(self) -> torch.Tensor:
        """``p - q`` where a token is trained on, 0 elsewhere: rollouts often have no log-probability for prompt tokens."""
        return torch.where(self.trained, self.logprobs - self.rollout_logprobs, 0.0)

    @property
    def trained(self) -> torch.Tensor:
        """bool: counted, and the advantage is not 0."""
        return self.counted & (self.advantages != 0)

    def clipped(self, ratio: torch.Tensor) -> torch.Tensor:
        """`ratio` between the thresholds: those of each token where the batch has them, else those of the settings."""
        given = (self.micro.per_token.get(name, self.settings[name]) for name in (_LOW, _HIGH))
        low, high = (torch.as_tensor(each, dtype=ratio.dtype, device=ratio.device) for each in given)
        return ratio.clamp(min=low).clamp(max=high)


@dataclass(frozen=True, slots=True)
class _PolicyLoss:
    """A policy's loss: its formula, its required inputs, and its settings with their defaults."""

    formula: Callable[[_Tokens], tuple[torch.Tensor, torch.Tensor]]
    """Returns the loss and the probability ratio of each token."""
    inputs: tuple[str, ...] = _POLICY
    settings: Mapping[str, float] | None = None


def _importance_sampling(tokens: _Tokens) -> tuple[torch.Tensor, torch.Tensor]:
    """``-r A``."""
    ratio = ratio_of(tokens.log_ratio)
    return -ratio * tokens.advantages, ratio


def _ppo(tokens: _Tokens) -> tuple[torch.Tensor, torch.Tensor]:
    """``-min(r A, clip(r) A)``."""
    ratio = ratio_of(tokens.log_ratio)
    return -torch.minimum(ratio * tokens.advantages, tokens.clipped(ratio) * tokens.advantages), ratio


def _cispo(tokens: _Tokens) -> tuple[torch.Tensor, torch.Tensor]:
    """``-stop(clip(r)) p A``, where ``stop`` stops the gradient."""
    ratio = ratio_of(tokens.log_ratio.detach())
    return -tokens.clipped(ratio) * tokens.logprobs * tokens.advantages, ratio


def _dro(tokens: _Tokens) -> tuple[torch.Tensor, torch.Tensor]:
    """``-(p A - beta / 2 (p - q)^2)``; the penalty applies to every token, even if ``A`` is 0."""
    distance = torch.where(tokens.counted, tokens.logprobs - tokens.rollout_logprobs, 0.0)
    penalty = 0.5 * tokens.settings[_BETA] * distance**2
    return penalty - tokens.logprobs * tokens.advantages, ratio_of(tokens.log_ratio.detach())


def _gspo(tokens: _Tokens) -> tuple[torch.Tensor, torch.Tensor]:
    """``-min(s A, clip(s) A)`` with ``s = exp(mean of (p - q))``.

    The mean is that over the tokens of a sequence whose ``sequence_ratio_mask`` is not 0; ``s`` is 1 if there are none. Each
    token has the value of ``s`` and the gradient of its own ``p`` (GSPO-token, arXiv 2507.18071, equation 13).
    """
    micro, detached = tokens.micro, tokens.logprobs.detach()
    marked = (micro.required(_RATIO_MASK) != 0) & (micro.targets != IGNORED)
    drift = torch.where(marked, detached - tokens.rollout_logprobs, 0.0)
    sums, counts = (micro.sum_by_sequence(_by_token(each)) for each in (drift, marked.to(drift.dtype)))
    mean = (sums / counts.clamp(min=1.0))[micro.sequence_of]
    ratio = ratio_of(mean.reshape(-1, *[1] * (detached.ndim - 1)) + tokens.logprobs - detached)
    return -torch.minimum(ratio * tokens.advantages, tokens.clipped(ratio) * tokens.advantages), ratio


_CLIPPED = {_LOW: 0.8, _HIGH: 1.2}
_POLICY_LOSSES = {
    "importance_sampling": _PolicyLoss(_importance_sampling),
    "ppo": _PolicyLoss(_ppo, settings=_CLIPPED),
    "cispo": _PolicyLoss(_cispo, settings={_LOW: 0.0, _HIGH: 4.0}),
    # No defaults are documented for the next two: dro has that of its page's example, gspo has those of ppo.
    "dro": _PolicyLoss(_dro, settings={_BETA: 0.05}),
    "gspo": _PolicyLoss(_gspo, (*_POLICY, _RATIO_MASK), _CLIPPED),
}
_CROSS_ENTROPY = "cross_entropy"

NAMES = (_CROSS_ENTROPY, *_POLICY_LOSSES)
"""Names of all losses."""
INPUTS = (_WEIGHTS, *_POLICY, _RATIO_MASK, _LOW, _HIGH)
"""The per-token values that any loss reads."""


class ServiceLoss:
    """A loss of the Tinker API, as ranks call it. It can be pickled.

    The loss of a token is ``-p`` for cross_entropy. `_POLICY_LOSSES` has the formulas of the others, in which ``clip(r)`` clamps
    ``r`` to the thresholds; these may also be inputs of each token under the same names. A log ratio above `LARGEST_LOG_RATIO`
    is clamped to it and has no gradient, so nothing overflows.

    Metrics are sums, since clients add them up. cross_entropy has ``weights``. The others have four, over tokens with an
    advantage and a weight: ``trained_tokens``; ``ratio``; ``clipped``, tokens whose ratio is beyond a threshold; and ``kl``,
    from the sampling policy to the model by the estimator ``r - 1 - log r``.

    Raises `ConfigError` if there is no such loss or setting, or a setting is not a number in its range. Settings that are left
    out have their defaults.
    """

    def __init__(self, name: str, config: Mapping[str, float | str] | None = None) -> None:
        if name not in NAMES:
            raise ConfigError(
                f"no loss is called {name[:80]!r}.",
                part=_PART,
                hint=f"There are {', '.join(NAMES)}. forward_backward_custom computes any other one in the client.",
            )
        self.name = name
        self._config = dict(config or {})
        self._policy = _POLICY_LOSSES.get(name)
        self._settings = _checked(name, (self._policy and self._policy.settings) or {}, self._config)
        self.inputs: tuple[str, ...] = self._policy.inputs if self._policy else ()
        """The per-token values that the loss requires."""

    def __reduce__(self) -> tuple[Any, ...]:
        return ServiceLoss, (self.name, self._config)

    def check_inputs(self, batch: TokenBatch) -> None:
        """Raise `ProtocolError` if `batch` lacks a value that the loss needs, or has one that no loss reads."""
        given = batch.sequences[0].per_token
        lacking = [name for name in self.inputs if name not in given]
        if lacking:
            raise ProtocolError(
                f"{self.name} needs {', '.join(lacking)}; loss_fn_inputs are {', '.join(given) or 'targets alone'}.",
                part=_PART,
                hint="Give every datum a value for each target.",
            )
        unknown = [name for name in given if name not in INPUTS]
        if unknown:
            raise ProtocolError(
                f"no loss reads {', '.join(unknown)}.",
                part=_PART,
                hint=f"Leave it out: {', '.join(INPUTS)} are read. A mask is written as weights or advantages of 0.",
            )

    def __call__(self, outputs: ModelOutputs, micro: MicroBatch) -> LossOutput:
        """See `Loss`."""
        logprobs = outputs.required("logprobs")
        weights = micro.per_token.get(_WEIGHTS, torch.ones_like(logprobs))
        counted = (micro.targets != IGNORED) & (weights != 0)
        if self._policy is None:
            loss = LossTerm(-torch.where(counted, logprobs * weights, 0.0).sum(), 1.0)
            return LossOutput({self.name: loss}, {_WEIGHTS: LossTerm(torch.where(counted, weights, 0.0).sum(), 1.0)})
        advantages = micro.required(_ADVANTAGES)
        tokens = _Tokens(micro, logprobs, micro.required(_LOGPROBS), advantages, counted, self._settings)
        per_token, ratio = self._policy.formula(tokens)
        loss = LossTerm(torch.where(counted, per_token * weights, 0.0).sum(), 1.0)
        return LossOutput({self.name: loss}, _metrics(tokens, ratio.detach(), clips=_LOW in self._settings))


def loss_report(loss: ServiceLoss, batch: TokenBatch, logprobs: Sequence[torch.Tensor]) -> dict[str, float]:
    """The loss and metrics, as `LossSums.named`, of a forward pass without backward, for which ranks return log-probabilities.

    `logprobs` are those of each sequence's targets, [N] or [N, K].
    """
    micro = batch.packed
    sums = LossSums(LossDenominators.of(batch))
    with torch.no_grad():
        sums.add(loss(ModelOutputs(logprobs=torch.cat(list(logprobs)).to(micro.tokens.device)), micro))
    return sums.named(sums.as_tensor(), batch.target_tokens)


def _checked(name: str, defaults: Mapping[str, float], config: Mapping[str, float | str]) -> dict[str, float]:
    """The settings of the loss `name`: `config` over `defaults`, checked."""
    offered = ", ".join(f"{key} (default {value})" for key, value in defaults.items()) or "none"
    for key, value in config.items():
        if key not in defaults:
            raise ConfigError(f"{name} has no setting {key[:80]!r}.", part=_PART, hint=f"Its settings: {offered}.")
        if isinstance(value, str) or not math.isfinite(value) or value < 0:
            raise ConfigError(f"{key} of {name} is {value!r}.", part=_PART, hint="It is a finite number from 0.")
    settings = {**defaults, **{key: float(value) for key, value in config.items()}}
    if _LOW in settings and settings[_LOW] > settings[_HIGH]:
        raise ConfigError(
            f"{_LOW} of {name} is {settings[_LOW]}, above {_HIGH}, {settings[_HIGH]}.",
            part=_PART,
            hint="They are bounds of the ratio itself, such as 0.8 and 1.2.",
        )
    return settings


def _metrics(tokens: _Tokens, ratio: torch.Tensor, *, clips: bool) -> dict[str, torch.Tensor | LossTerm]:
    with torch.no_grad():
        trained = tokens.trained
        drift = tokens.log_ratio.clamp(-LARGEST_LOG_RATIO, LARGEST_LOG_RATIO)
        beyond = trained & (tokens.clipped(ratio) != ratio) if clips else torch.zeros_like(trained)
        found = {
            "trained_tokens": trained.to(drift.dtype).sum(),
            "ratio": torch.where(trained, ratio, 0.0).sum(),
            "clipped": beyond.to(drift.dtype).sum(),
            "kl": (torch.exp(drift) - 1.0 - drift).sum(),
        }
    return {name: LossTerm(total, 1.0) for name, total in found.items()}


def _by_token(values: torch.Tensor) -> torch.Tensor:
    """[N]: `values` [N] or [N, K], added up over labels."""
    return values.reshape(len(values), -1).sum(1)
