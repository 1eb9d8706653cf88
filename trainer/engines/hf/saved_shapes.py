"""Compare names and shapes of the weights in files, or in a saved training state, with those of the model that will load them."""

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

    A state with more or larger tensors is refused, too: it is of another model, yet parts of it would load without an error.

    Args:
        directory: The saved training state.
        saved: Shape of each weight in it.
        wanted: Shape of each weight of the model, under the same names.
    """
    if difference := misfit(saved, wanted):
        raise ConfigError(
            f"the training state in {directory} does not fit this model: {difference}.",
            part=PART,
            hint="Check model and path: a state is loaded into the model that it was saved from.",
        )


def misfit(held: Mapping[str, tuple[int, ...]], wanted: Mapping[str, tuple[int, ...]]) -> str:
    """Describe how the weights in files, shapes by name, differ from those of a model; empty if they do not."""
    for kind, names in (
        ("missing keys", wanted.keys() - held.keys()),
        ("unexpected keys", held.keys() - wanted.keys()),
        ("mismatched shapes of", {name for name in wanted.keys() & held.keys() if wanted[name] != held[name]}),
    ):
        if names:
            some = sorted(names)[:_SHOWN]
            return f"{kind} {', '.join(some)}{' and more' if len(names) > _SHOWN else ''}"
    return ""
