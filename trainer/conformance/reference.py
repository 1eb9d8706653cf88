"""The oracle of the checks: plain transformers and torch's AdamW in float64, in one process, one sequence at a time."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from ..data.sequences import IGNORED, TEMPERATURE, TokenSequence
from .batches import CONSTANT, WEIGHTS, BatchSpec

NEVER_TRAINED = "e_score_correction_bias"
"""End of the names of tensors that no optimizer changes."""

TOP_K = 3
"""Number of the most probable tokens that the reference returns."""


class Reference:
    """A model in float64, and the training that an engine is compared with.

    The loss of `batches.three_terms` is implemented here a second time, over full log-probabilities.
    """

    def __init__(self, path: Path) -> None:
        from transformers import AutoModelForCausalLM  # noqa: PLC0415 - an extra

        self.model: Any = AutoModelForCausalLM.from_pretrained(
            path, dtype=torch.float64, experts_implementation="eager", attn_implementation="eager"
        ).eval()

    def outputs(self, sequence: TokenSequence) -> dict[str, torch.Tensor]:
        """Compute the outputs of one sequence, by name.

        ``logprobs`` of the targets' shape, ``entropy`` [T] in nats, ``top_tokens`` and ``top_logprobs`` [T, `TOP_K`], 0 where
        there is no target; and ``hidden`` [T, width].
        """
        found = self.model(sequence.tokens[None], use_cache=False, output_hidden_states=True)
        logs = torch.log_softmax(found.logits[0] / sequence.per_sequence[TEMPERATURE], -1)
        labels = sequence.targets.view(sequence.length, -1)
        there = labels != IGNORED
        chosen = torch.where(there, logs.gather(1, labels.clamp(min=0)), 0.0)
        entropy = torch.where(there.any(1), -(logs.exp() * logs).sum(1), 0.0)
        best, some = logs.topk(TOP_K), there.any(1, keepdim=True)
        return {
            "top_tokens": torch.where(some, best.indices, 0),
            "top_logprobs": torch.where(some, best.values, 0.0),
            "logprobs": chosen.view(sequence.targets.shape),
            "entropy": entropy,
            "hidden": found.hidden_states[-1][0],
        }

    def loss(self, spec: BatchSpec) -> dict[str, torch.Tensor]:
        """Compute the terms of the loss over all calls of a mini-batch, and ``loss``, their sum: scalars with gradient."""
        sequences = spec.sequences()
        tokens = sum(sequence.target_tokens for sequence in sequences)
        terms = {name: torch.zeros((), dtype=torch.float64) for name in ("weighted", "square", "entropy")}
        for row in (row for call in spec.calls or [range(spec.rows)] for row in call):
            sequence = sequences[row]
            found = self.outputs(sequence)
            logprobs, entropy = found["logprobs"], found["entropy"]
            weights = sequence.per_token[WEIGHTS].view(-1, *[1] * (logprobs.ndim - 1))
            terms["weighted"] = terms["weighted"] - (weights * logprobs).sum() / tokens
            terms["square"] = terms["square"] + logprobs.square().sum() / max(1, sequence.target_tokens) / len(
                sequences
            )
            terms["entropy"] = terms["entropy"] - entropy.sum() / CONSTANT
        return {
            "loss": sum(terms.values(), torch.zeros(())),
            **{f"loss/{name}": value for name, value in terms.items()},
        }

    def gradient(self, spec: BatchSpec) -> tuple[dict[str, float], dict[str, torch.Tensor]]:
        """Return the loss with its terms, and the gradient by checkpoint name."""
        self.model.zero_grad()
        terms = self.loss(spec)
        torch.autograd.backward(terms["loss"])
        weights = {name: parameter.detach().clone() for name, parameter in self.model.named_parameters()}
        with torch.no_grad():
            for parameter in self.model.parameters():
                parameter.copy_(torch.zeros_like(parameter) if parameter.grad is None else parameter.grad)
            found = {name: value for name, value in self.tensors().items() if not name.endswith(NEVER_TRAINED)}
            for name, parameter in self.model.named_parameters():
                parameter.copy_(weights[name])
        return {name: float(value.detach()) for name, value in terms.items()}, found

    def train(self, specs: list[BatchSpec], trainer: Mapping[str, Any]) -> list[float]:
        """Step once for each of `specs`, with ``torch.optim.AdamW``; returns the gradient norms before clipping.

        `trainer` has ``learning_rate``, ``lr_warmup_steps``, ``betas``, ``weight_decay`` and ``max_grad_norm``.
        """
        parameters = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        optimizer = torch.optim.AdamW(parameters, betas=trainer["betas"], weight_decay=trainer["weight_decay"])
        norms = []
        for step, spec in enumerate(specs):
            optimizer.zero_grad()
            torch.autograd.backward(self.loss(spec)["loss"])
            norms.append(float(torch.nn.utils.clip_grad_norm_(parameters, trainer["max_grad_norm"])))
            share = min(1.0, (step + 1) / max(1, trainer["lr_warmup_steps"]))
            for group in optimizer.param_groups:
                group["lr"] = trainer["learning_rate"] * share
            optimizer.step()
        return norms

    def tensors(self) -> dict[str, torch.Tensor]:
        """Return the model's tensors by their names on disk."""
        with tempfile.TemporaryDirectory(prefix="conformance-") as folder:
            self.model.save_pretrained(folder)
            return checkpoint(Path(folder))


def checkpoint(path: Path) -> dict[str, torch.Tensor]:
    """Return the tensors of the model directory `path`, by name. Reads every safetensors file, and no other."""
    from safetensors.torch import load_file  # noqa: PLC0415 - an extra

    tensors: dict[str, torch.Tensor] = {}
    for file in sorted(path.glob("*.safetensors")):
        tensors |= load_file(file)
    return tensors
