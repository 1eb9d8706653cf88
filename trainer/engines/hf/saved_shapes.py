"""Compares the weights in a saved training state with those of the model that is to load it, by names and shapes."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from weightlane.ckpt_engines import ConfigError

from .partial_dir import PART

_SHOWN = 5
"""Names in an error: enough to recognise a pattern."""


def refuse_other_state(
    directory: Path, saved: Mapping[str, tuple[int, ...]], wanted: Mapping[str, tuple[int, ...]]
) -> None:
    """Raise `ConfigError` unless a state has exactly the weights of a model.

    A state with more, or larger, tensors is of another model as well: parts of it would load without an error.

    Args:
        directory: The saved training state.
        saved: Shape of each weight in it.
        wanted: Shape of each weight of the model, under the same names.
    """
    both = saved.keys() & wanted.keys()
    for kind, names in (
        ("it lacks", wanted.keys() - saved.keys()),
        ("it has other weights as well, such as", saved.keys() - wanted.keys()),
        ("it has other shapes of", {name for name in both if saved[name] != wanted[name]}),
    ):
        if names:
            some = sorted(names)[:_SHOWN]
            more = " and more" if len(names) > _SHOWN else ""
            raise ConfigError(
                f"the training state in {directory} does not fit this model: {kind} {', '.join(some)}{more}.",
                part=PART,
                hint="Check model and path: a state is loaded into the model that it was saved from.",
            )
