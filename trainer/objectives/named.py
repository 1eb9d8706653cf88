"""Objectives by the name that a configuration gives them: a built-in one, or ``module:function``."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from weightlane.ckpt_engines import ConfigError, ProtocolError

from ..config import AlgorithmConfig
from ..data.batch import MicroBatch
from ..named_function import function_named
from .cispo import cispo
from .dual_clip import dual_clip
from .grpo import grpo
from .gspo import gspo
from .loss import Loss, LossOutput, ModelOutputs, needed_outputs

BUILT_IN: dict[str, Callable[[AlgorithmConfig], Loss]] = {
    "cispo": cispo,
    "dual_clip": dual_clip,
    "grpo": grpo,
    "gspo": gspo,
}
_PART = "objective"


class Objective:
    """The loss that ``[algorithm] objective`` names. Other processes can be handed it, and import it anew.

    Args:
        config: The run's algorithm section.
        search_path: Folders in which the module of ``module:function`` is looked for before installed packages.

    Raises:
        ConfigError: There is no such objective, or its module cannot be imported.
    """

    def __init__(self, config: AlgorithmConfig, search_path: Sequence[Path] = ()) -> None:
        self.name = config.objective
        self._config, self._search_path = config, tuple(search_path)
        if self.name in BUILT_IN:
            self._loss = BUILT_IN[self.name](config)
        elif ":" in self.name:
            self._loss = function_named(self.name, search_path, part=_PART, setting="algorithm.objective")
        else:
            nearest = difflib.get_close_matches(self.name, BUILT_IN, n=1, cutoff=0.5)
            guess = f"Did you mean {nearest[0]!r}? " if nearest else ""
            raise ConfigError(
                f"no objective is called {self.name!r}.",
                part=_PART,
                hint=f"{guess}Built in: {', '.join(sorted(BUILT_IN))}; or name your own as 'module:function'.",
            )
        self.needs = needed_outputs(self._loss)

    def __reduce__(self) -> tuple[Any, ...]:
        return Objective, (self._config, self._search_path)

    def __call__(self, outputs: ModelOutputs, micro: MicroBatch) -> LossOutput:
        """See `Loss`. Raises `ProtocolError` when a function of the user's own returns something else."""
        found: Any = self._loss(outputs, micro)
        if not isinstance(found, LossOutput):
            raise ProtocolError(
                f"the objective {self.name!r} returned a {type(found).__name__}, not a LossOutput.",
                part=_PART,
                hint="weightlane.trainer.LossOutput holds the sums of a loss, and by what each is divided.",
            )
        return found
