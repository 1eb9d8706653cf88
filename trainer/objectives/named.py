"""Objectives by their name in a configuration: a built-in one, or ``module:function``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from weightlane.ckpt_engines import ProtocolError

from ..data.named_function import built_in_or_own
from ..data.sequences import IGNORED, MicroBatch
from .config import AlgorithmConfig
from .loss import LOGPROBS, Loss, LossOutput, ModelOutputs, OutputName, needed_outputs
from .policy import cispo, dual_clip, entropy_bonus, gspo, token_surrogate
from .policy_values import ROLLOUT_LOGPROBS, mismatched
from .reference_kl import reference_kl

BUILT_IN: dict[str, Callable[[AlgorithmConfig], Loss]] = {
    "cispo": cispo,
    "dual_clip": dual_clip,
    "grpo": token_surrogate,
    "gspo": gspo,
    "ppo": token_surrogate,
}
_PART = "objective"


class Objective:
    """The loss that ``[algorithm] objective`` names, and the terms that ``[algorithm]`` adds to it.

    `reference_kl` is added if ``kl_coefficient`` is above 0, and `entropy_bonus` if ``entropy_coefficient`` is. They keep the
    targets that ``mismatch_mask`` leaves out of the loss. With rollouts' log-probabilities in the batch there are the metrics
    ``rollout_gap``, the mean absolute difference of the trainer's to them, and ``mismatch_masked``, the share left out.

    An objective can be pickled for another process, which imports its function again.

    Args:
        config: The run's algorithm section.
        search_path: Folders in which the module of ``module:function`` is looked for before installed packages.

    Raises:
        ConfigError: There is no such objective, or its module cannot be imported.
    """

    def __init__(self, config: AlgorithmConfig, search_path: Sequence[Path] = ()) -> None:
        self.name = config.objective
        self._config, self._search_path = config, tuple(search_path)
        self._loss: Loss = built_in_or_own(
            self.name, BUILT_IN, config, search_path, part=_PART, setting="algorithm.objective"
        )
        coefficients = ((config.kl_coefficient, reference_kl), (config.entropy_coefficient, entropy_bonus))
        self._added = tuple(make(config) for coefficient, make in coefficients if coefficient > 0)
        every = [output for loss in (self._loss, *self._added) for output in needed_outputs(loss)]
        compared = LOGPROBS if config.mismatch_mask != "none" else ()
        self.needs: tuple[OutputName, ...] = tuple(dict.fromkeys([*every, *compared]))

    def __reduce__(self) -> tuple[Any, ...]:
        return Objective, (self._config, self._search_path)

    def __call__(self, outputs: ModelOutputs, micro: MicroBatch) -> LossOutput:
        """See `Loss`.

        Raises `ProtocolError` if the user's own function does not return a `LossOutput`, or uses the name of an added term.
        """
        gaps, counted = self._compared(outputs, micro)
        found: Any = self._loss(outputs, counted)
        if not isinstance(found, LossOutput):
            raise ProtocolError(
                f"the objective {self.name!r} returned a {type(found).__name__}, not a LossOutput.",
                part=_PART,
                hint="weightlane.trainer.LossOutput holds the sums of a loss, and by what each is divided.",
            )
        if counted is not micro:  # metrics are of all targets, by whose number they are divided
            with torch.no_grad():
                found = LossOutput(found.terms, self._loss(outputs, micro).metrics)
        whole = self._sum(found, gaps)
        for loss in self._added:
            whole = self._sum(whole, loss(outputs, micro))
        return whole

    def _compared(self, outputs: ModelOutputs, micro: MicroBatch) -> tuple[LossOutput, MicroBatch]:
        """How far trainer and rollout are apart, and `micro` without what `mismatch_mask` leaves out."""
        metrics: dict[str, torch.Tensor] = {}
        with torch.no_grad():
            if outputs.logprobs is not None and ROLLOUT_LOGPROBS in micro.per_token:
                gap = (outputs.logprobs - micro.per_token[ROLLOUT_LOGPROBS]).abs()
                metrics["rollout_gap"] = torch.where(micro.mask, gap, 0.0).sum()
            if self._config.mismatch_mask != "none":
                tail = mismatched(outputs.required("logprobs"), micro, self._config)
                metrics["mismatch_masked"] = tail.sum().float()
                micro = replace(micro, targets=torch.where(tail, IGNORED, micro.targets))
        return LossOutput({}, metrics), micro

    def _sum(self, own: LossOutput, added: LossOutput) -> LossOutput:
        both = {*(own.terms.keys() & added.terms.keys()), *(own.metrics.keys() & added.metrics.keys())}
        if both:
            raise ProtocolError(
                f"the objective {self.name!r} and a term that [algorithm] adds to it both name {', '.join(both)}.",
                part=_PART,
                hint="Rename it in the objective, or set kl_coefficient and entropy_coefficient to 0.",
            )
        return LossOutput({**own.terms, **added.terms}, {**own.metrics, **added.metrics})
