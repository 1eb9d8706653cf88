"""Make a transformers model return log-probabilities of chosen targets instead of logits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from weightlane.ckpt_engines import ConfigError

from ..head import LogitTransform, head_outputs

_PROBE = (1e-3, 1e6, 1.0, -3.0, 30.0)
"""Logits that the model transforms in every forward pass. Two of them determine the transform, the others confirm it."""


@dataclass(frozen=True, slots=True)
class HeadQuery:
    """A request for outputs of a model. It is one object so that FSDP's mixed precision doesn't cast its tensors."""

    rows: torch.Tensor
    """int64 [R]: positions, in the flattened rows of tokens."""
    labels: torch.Tensor | None
    """int64 [R] or [R, K]: tokens whose log-probability is wanted there; None if only hidden states or logits are."""
    temperatures: torch.Tensor | None = None
    """float32 [R], by which logits are divided."""
    entropy: bool = False
    """Whether entropies are wanted."""
    top_k: int = 0
    """How many of the most probable tokens are wanted."""
    hidden_rows: torch.Tensor | None = None
    """int64 [N]: positions whose hidden states, the head's input, are wanted; None for none."""
    logit_rows: torch.Tensor | None = None
    """int64 [L]: positions whose logits are wanted, without temperature; None for none."""


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


def replace_head(model: torch.nn.Module) -> int:
    """Make `model`, a causal language model of transformers, compute its head in chunks, see `head_outputs`.

    Afterwards, ``model(query, **inputs)`` runs it on ``inputs`` and returns the outputs that ``query``, a `HeadQuery`, asks for,
    under their names in `ModelOutputs`. The head is still computed within the model's own forward pass, where FSDP has gathered
    its weight. Its parameters keep their names.

    Returns:
        Size of the head's vocabulary, in tokens.

    Raises:
        ConfigError: The model has no linear head.
    """
    head = causal_head(model)
    _Head(model, head)
    return head.out_features


class _Head:
    """Replacement for the forward methods of a model and of its head."""

    def __init__(self, model: torch.nn.Module, head: torch.nn.Linear) -> None:
        self._model, self._head = model, head
        self._run = model.forward
        self._read: torch.Tensor | None = None
        self._transform: LogitTransform | None = None
        model.forward = self
        head.forward = self._keep  # type: ignore[method-assign, assignment]

    def _keep(self, hidden: torch.Tensor) -> torch.Tensor:
        """Replace the head: keep its input, and return known logits to the rest of the model's forward pass."""
        if self._read is not None:
            raise ConfigError(
                f"{type(self._model).__name__} calls its head more than once in a forward pass.",
                part="fsdp2 engine",
                hint="Its log-probabilities cannot be computed in chunks; train another architecture.",
            )
        self._read = hidden
        return torch.tensor(_PROBE, device=hidden.device).expand(*hidden.shape[:-1], -1)

    def __call__(self, query: HeadQuery, **inputs: Any) -> dict[str, torch.Tensor]:
        self._read = None
        probe = self._run(**inputs, use_cache=False).logits[0, 0].detach()
        hidden, self._read = self._read, None
        assert hidden is not None
        if self._transform is None:
            self._transform = _transform_of(probe, self._model)
        flat, found = hidden.flatten(0, -2), {}
        if query.hidden_rows is not None:
            found["hidden"] = flat[query.hidden_rows]
        if query.logit_rows is not None:
            logits = torch.nn.functional.linear(flat[query.logit_rows], self._head.weight, self._head.bias)
            found["logits"] = self._transform(logits.float())
        if query.labels is None:
            return found
        outputs = head_outputs(
            flat[query.rows],
            self._head.weight,
            query.labels,
            entropy=query.entropy,
            top_k=query.top_k,
            bias=self._head.bias,
            temperatures=query.temperatures,
            transform=self._transform,
        )
        found["logprobs"] = outputs.logprobs
        if query.entropy:
            found["entropy"] = outputs.entropy
        if query.top_k:
            found |= {"top_tokens": outputs.top_tokens, "top_logprobs": outputs.top_logprobs}
        return found


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
