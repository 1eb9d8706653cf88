"""A critic: a transformers model whose head computes one value per token instead of logits."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from weightlane.ckpt_engines import ConfigError

from .causal_head import HeadQuery


def value_head(model: torch.nn.Module) -> tuple[str, torch.nn.Linear]:
    """Return name and module of the head of `model`, one of transformers' models for token classification with one label.

    Raises `ConfigError` when it has no such head.
    """
    for name, module in model.named_children():
        if isinstance(module, torch.nn.Linear) and module.out_features == 1:
            return name, module
    raise ConfigError(
        f"{type(model).__name__} has no linear head with one output.",
        part="value head",
        hint="Take another architecture for a model with trainer.head=value.",
    )


def read_values(model: torch.nn.Module) -> None:
    """Make `model` return the outputs that a `HeadQuery` asks for: ``values``, float32 [R], and ``hidden``, if that is wanted.

    The head computes in float32, whatever the model's dtype: in half precision a value would have only two or three digits.
    """
    _ValueHead(model, value_head(model)[1])


def unused_heads(held: Iterable[str], model: torch.nn.Module, head: str) -> set[str]:
    """Return the tensors `held` in a checkpoint that a critic does not need: heads other than its own, named `head`."""
    inside = f"{model.base_model_prefix}."
    return {name for name in held if not name.startswith((inside, f"{head}."))}


class _ValueHead:
    """Replacement for the forward methods of a model and of its head."""

    def __init__(self, model: torch.nn.Module, head: torch.nn.Linear) -> None:
        self._head, self._run = head, model.forward
        self._read: torch.Tensor | None = None
        model.forward = self
        head.forward = self._keep  # type: ignore[method-assign, assignment]

    def _keep(self, hidden: torch.Tensor) -> torch.Tensor:
        """Replace the head: keep its input, and compute its output in float32."""
        self._read = hidden
        bias = None if self._head.bias is None else self._head.bias.float()
        return torch.nn.functional.linear(hidden.float(), self._head.weight.float(), bias)

    def __call__(self, query: HeadQuery, **inputs: Any) -> dict[str, torch.Tensor]:
        values = self._run(**inputs, use_cache=False).logits.flatten()
        hidden, self._read = self._read, None
        found = {"values": values[query.rows]}
        if query.hidden_rows is not None:
            assert hidden is not None
            found["hidden"] = hidden.flatten(0, -2)[query.hidden_rows]
        return found
