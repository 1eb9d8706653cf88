"""Make a transformers model return log-probabilities of chosen targets, or a critic's values, instead of logits."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from weightlane.ckpt_engines import ConfigError

from ...data.sequences import MicroBatch
from ..head import LogitTransform, PassQuery
from ..rank_collectives import ContextRanks

_PROBE = (1e-3, 1e6, 1.0, -3.0, 30.0)
"""Logits that the model transforms in every forward pass. Two of them determine the transform, the others confirm it."""


class HeadQuery:
    """A request for outputs of a model, which is an argument of the model.

    It is no dataclass: FSDP's mixed precision casts the tensors in dataclasses, tuples and dicts, such as temperatures.

    Args:
        query: The outputs.
        micro: The micro-batch.
        places: int64 [N], where each token of the micro-batch is in the flattened rows of tokens that the model computes; -1 for
            those that other ranks compute.
        context: The ranks that share the tokens, if any do.
    """

    __slots__ = ("context", "micro", "places", "query")

    def __init__(
        self, query: PassQuery, micro: MicroBatch, places: torch.Tensor, context: ContextRanks | None = None
    ) -> None:
        self.query, self.micro, self.places, self.context = query, micro, places, context

    def answered(
        self, compute: Callable[[PassQuery, torch.Tensor], dict[str, torch.Tensor]]
    ) -> dict[str, torch.Tensor]:
        """Return the outputs that `compute` finds for the tokens of this rank, joined with those of the other ranks.

        `compute` takes the request for tokens of this rank, and the places of all of these, whose hidden states may be wanted.
        """
        if self.context is None:
            return compute(self.query, self.places)
        query, mine = self.query, self.places >= 0
        wanted = {"rows": query.rows, "logits": query.logit_rows, "hidden": torch.arange(len(mine), device=mine.device)}
        here = {name: mine[rows].nonzero().squeeze(1) for name, rows in wanted.items() if rows is not None}
        logit_rows = None if query.logit_rows is None else query.logit_rows[here["logits"]]
        local = replace(query, rows=query.rows[here["rows"]], logit_rows=logit_rows)
        found = {}
        for name, values in compute(local, self.places[mine]).items():
            of = name if name in here else "rows"
            rows = wanted[of]
            assert rows is not None
            found[name] = self.context.joined(values, here[of], len(rows))
        return found


def causal_head(model: torch.nn.Module) -> torch.nn.Linear:
    """The head of `model`, a causal language model of transformers. Raises `ConfigError` when it is no linear layer."""
    head = model.get_output_embeddings()  # type: ignore[operator]  # of transformers' PreTrainedModel
    if not isinstance(head, torch.nn.Linear):
        raise ConfigError(
            f"{type(model).__name__} has no linear head over its vocabulary.",
            part="fsdp2 engine",
            hint="Train a causal language model.",
        )
    return head


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


def replace_head(model: torch.nn.Module) -> int:
    """Make `model`, a causal language model of transformers, compute its head in chunks, see `head_outputs`.

    Afterwards, ``model(query, **inputs)`` runs it on ``inputs`` and returns the outputs that ``query``, a `HeadQuery`, asks for,
    under their names in `ModelOutputs`. The head is still computed within the model's own forward pass, where FSDP has gathered
    its weight. Its parameters keep their names. Returns the size of its vocabulary, in tokens.

    Raises `ConfigError` if the model has no linear head.
    """
    head = causal_head(model)
    _TokenHead(model, head)
    return head.out_features


def read_values(model: torch.nn.Module) -> None:
    """Make `model` return ``values``, float32 [R], and ``hidden``, if a `HeadQuery` asks for it; see `replace_head`.

    The head computes in float32, whatever the model's dtype: in half precision a value would have only two or three digits.
    """
    _ValueHead(model, value_head(model)[1])


class _Head(ABC):
    """Replacement for the forward methods of a model and of its head."""

    def __init__(self, model: torch.nn.Module, head: torch.nn.Linear) -> None:
        self._model, self._head = model, head
        self._run = model.forward
        self._read: torch.Tensor | None = None
        model.forward = self  # type: ignore[assignment]  # subclasses are callable
        head.forward = self._keep  # type: ignore[method-assign, assignment]

    @abstractmethod
    def _keep(self, hidden: torch.Tensor) -> torch.Tensor:
        """Replace the head: keep its input, and return logits to the rest of the model's forward pass."""

    def _run_model(self, inputs: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the model's logits, and the input of its head: [tokens, width]."""
        self._read = None
        logits: torch.Tensor = self._run(**inputs, use_cache=False).logits
        hidden, self._read = self._read, None
        assert hidden is not None
        return logits, hidden.flatten(0, -2)


class _TokenHead(_Head):
    """The head of a language model."""

    _transform: LogitTransform | None = None

    def _keep(self, hidden: torch.Tensor) -> torch.Tensor:
        if self._read is not None:
            raise ConfigError(
                f"{type(self._model).__name__} calls its head more than once in a forward pass.",
                part="fsdp2 engine",
                hint="Its log-probabilities cannot be computed in chunks; train another architecture.",
            )
        self._read = hidden
        return torch.tensor(_PROBE, device=hidden.device).expand(*hidden.shape[:-1], -1)

    def __call__(self, asked: HeadQuery, **inputs: Any) -> dict[str, torch.Tensor]:
        probe, flat = self._run_model(inputs)
        if self._transform is None:
            self._transform = _transform_of(probe[0, 0].detach(), self._model)
        weight, bias, transform = self._head.weight, self._head.bias, self._transform

        def compute(query: PassQuery, read: torch.Tensor) -> dict[str, torch.Tensor]:
            places, found = asked.places, {}
            if query.hidden:
                found["hidden"] = flat[read]
            if query.logit_rows is not None:
                logits = torch.nn.functional.linear(flat[places[query.logit_rows]], weight, bias)
                found["logits"] = transform(logits.float())
            if query.asks_head:
                rows = flat[places[query.rows]]
                found |= query.from_head(rows, weight, asked.micro, bias=bias, transform=transform)
            return found

        return asked.answered(compute)


class _ValueHead(_Head):
    """The head of a critic."""

    def _keep(self, hidden: torch.Tensor) -> torch.Tensor:
        self._read = hidden
        bias = None if self._head.bias is None else self._head.bias.float()
        return torch.nn.functional.linear(hidden.float(), self._head.weight.float(), bias)

    def __call__(self, asked: HeadQuery, **inputs: Any) -> dict[str, torch.Tensor]:
        logits, flat = self._run_model(inputs)

        def compute(query: PassQuery, read: torch.Tensor) -> dict[str, torch.Tensor]:
            found = {"values": logits.flatten()[asked.places[query.rows]]}
            return {**found, "hidden": flat[read]} if query.hidden else found

        return asked.answered(compute)


def _transform_of(probe: torch.Tensor, model: torch.nn.Module) -> LogitTransform:
    """Find the transform from `probe`, which the model made of the logits `_PROBE`."""
    small, large = probe[:2].tolist()
    scale = small / _PROBE[0]
    softcap = None if abs(large) > 1e-3 * abs(scale) * _PROBE[1] else abs(large)
    found = LogitTransform(1.0 if abs(scale - 1.0) < 1e-5 else scale, softcap)  # noqa: PLR2004 - rounding
    expected = found(torch.tensor(_PROBE, device=probe.device))
    if not torch.allclose(probe.float(), expected, rtol=1e-4):
        raise ConfigError(
            f"{type(model).__name__} changes its logits in a way that is neither a factor nor a soft cap.",
            part="fsdp2 engine",
            hint="Its log-probabilities cannot be computed in chunks; train another architecture.",
        )
    return found
