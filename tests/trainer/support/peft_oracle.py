"""PEFT over plain transformers in float64, in one process: the account of adapters that ours are compared with.

    python peft_oracle.py PIPE ...

It answers commands as `engine_worker` does. PEFT and accelerate have a folder of their own (see .ci/setup-env): beside everything
else, they would change how transformers loads models.
"""

from __future__ import annotations

import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from engine_batches import TEMPERATURE, VOCAB, make_samples
from engine_worker import serve

PEFT = Path(sys.prefix) / "peft"


class Oracle:
    """The commands."""

    def make(self, model: str, directory: str, seed: int, targets: list[str] | None = None, **options: Any) -> None:
        """Save an adapter whose A and B are random numbers."""
        from peft import LoraConfig, get_peft_model

        config = LoraConfig(target_modules=targets or "all-linear", **options)
        adapted = get_peft_model(_model(model, torch.float32), config)
        random_of = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for name, parameter in adapted.named_parameters():
                if "lora_" in name:
                    parameter.copy_(torch.randn(parameter.shape, generator=random_of) * 0.1)
        adapted.save_pretrained(directory)

    def first_bound(self, columns: int) -> float:
        """The largest value that PEFT's own first A of so many columns can have."""
        from peft import LoraConfig, get_peft_model

        inner = torch.nn.Sequential(torch.nn.Linear(columns, 2))
        adapted = get_peft_model(inner, LoraConfig(r=512, target_modules=["0"]))
        (matrix,) = (parameter for name, parameter in adapted.named_parameters() if "lora_A" in name)
        return float(matrix.abs().max())

    def logprobs(
        self, model: str, adapter: str | None, rows: int, *, every_token: bool = False, fused: bool = False
    ) -> dict[int, Any]:
        """float64 log-probabilities at each token of a completion, of the token or of every one, by sample."""
        computed, _ = _adapted(model, adapter, fused=fused)
        with torch.no_grad():
            found = [_chosen(computed, sample) for sample in make_samples(0, rows)]
        return {row: each[every_token].numpy() for row, each in enumerate(found)}

    def gradient(self, model: str, adapter: str, rows: int) -> tuple[float, dict[str, Any]]:
        """Loss of a mini-batch by `engine_batches.mixed`; gradients by ``module|A`` or ``module|B``."""
        computed, matrices = _adapted(model, adapter)
        loss = _mixed(computed, make_samples(0, rows))
        loss.backward()
        return float(loss.detach()), {key: matrix.grad.numpy() for key, matrix in matrices.items()}

    def rounds(
        self, model: str, adapter: str, rounds: list[dict[str, list[int]]], rows: int, most: float, **adamw: Any
    ) -> tuple[list[dict[str, float]], dict[str, Any], dict[str, Any]]:
        """Steps of AdamW of the model's own weights, which are called "", and of an adapter on them, by another name.

        A round says which of both are stepped, each with the gradient of its own loss of some samples. Returns the norms of each
        round, and what both are at last, with the gradients of the last round as ``|exp_avg``.
        """
        computed, matrices = _adapted(model, adapter)
        weights = {
            name.removeprefix("base_model.model.").replace(".base_layer", ""): parameter
            for name, parameter in computed.named_parameters()
            if "lora_" not in name
        }
        of = {False: matrices, True: weights}
        optimizers = {own: torch.optim.AdamW(each.values(), **adamw) for own, each in of.items()}
        samples, norms = make_samples(0, rows), []
        for each in rounds:
            norms.append({})
            for slot, chosen in each.items():
                for own, parameters in of.items():
                    for parameter in parameters.values():
                        parameter.requires_grad_(own == (not slot))
                with computed.disable_adapter() if not slot else nullcontext():
                    _mixed(computed, [samples[row] for row in chosen]).backward()
                norm = torch.nn.utils.clip_grad_norm_(of[not slot].values(), most)
                norms[-1][slot] = float(norm)
            for slot in each:
                optimizers[not slot].step()
            kept = {own: {f"{name}|exp_avg": one.grad for name, one in each.items()} for own, each in of.items()}
            for optimizer in optimizers.values():
                optimizer.zero_grad()
        found = [{**{name: one.detach() for name, one in of[own].items()}, **kept[own]} for own in (True, False)]
        plain = [{name: each.numpy() for name, each in one.items() if each is not None} for one in found]
        return norms, plain[0], plain[1]

    def merged(self, model: str, adapter: str) -> dict[str, Any]:
        """float64 weights with the adapter merged, by name."""
        computed, _ = _adapted(model, adapter)
        return {name: tensor.numpy() for name, tensor in computed.merge_and_unload().state_dict().items()}


def _model(path: str, dtype: torch.dtype, *, fused: bool = False) -> Any:
    """transformers' model, unless `fused` with each expert's matrices as linear layers, beside which PEFT puts adapters.

    Not those of GPT-OSS, which are no linear layers in its checkpoints.
    """
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(path, dtype=dtype, experts_implementation="eager").eval()
    if fused:
        return model
    model.config.model_type = "unfused"  # else PEFT would convert adapters for fused experts
    for layer in model.model.layers:
        if hasattr(layer.mlp, "experts") and not hasattr(layer.mlp.experts, "gate_up_proj_bias"):
            layer.mlp.experts = _Experts(layer.mlp.experts)
    return model


class _Experts(torch.nn.ModuleList):
    """Experts under the names that checkpoints have, computed one after the other."""

    def __init__(self, fused: Any) -> None:
        super().__init__()
        for gate_up, down in zip(fused.gate_up_proj, fused.down_proj, strict=True):
            gate, up = gate_up.chunk(2)
            matrices = {"gate_proj": gate, "up_proj": up, "down_proj": down}
            self.append(torch.nn.ModuleDict({name: _linear(weight) for name, weight in matrices.items()}))

    def forward(self, hidden: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """Sum the chosen experts' outputs of `hidden` [tokens, width] by `weights` [tokens, choices]."""
        total = torch.zeros_like(hidden)
        for number, expert in enumerate(self):
            inner = torch.nn.functional.silu(expert["gate_proj"](hidden)) * expert["up_proj"](hidden)
            share = (weights * (chosen == number)).sum(-1, keepdim=True)
            total = total + share * expert["down_proj"](inner)
        return total


def _linear(weight: torch.Tensor) -> torch.nn.Linear:
    found = torch.nn.Linear(weight.shape[1], weight.shape[0], bias=False, dtype=weight.dtype)
    found.weight.data.copy_(weight.data)
    return found


def _adapted(path: str, adapter: str | None, *, fused: bool = False) -> tuple[Any, dict[str, torch.Tensor]]:
    """The model with an adapter, everything in float64, and the adapter's A and B."""
    model = _model(path, torch.float64, fused=fused)
    if adapter is None:
        return model, {}
    from peft import PeftModel

    loaded = PeftModel.from_pretrained(model, adapter, is_trainable=True, autocast_adapter_dtype=False).double().eval()
    found = {}
    for name, parameter in loaded.named_parameters():
        if "lora_" in name:
            module, _, rest = name.removeprefix("base_model.model.").partition(".lora_")
            found[f"{module}|{rest[0]}"] = parameter
    assert found
    return loaded, found


def _chosen(model: Any, sample: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probabilities of a sample's completion, and those of every token there."""
    ids = torch.tensor([sample.prompt_ids + sample.completion_ids])
    logits = model(input_ids=ids, use_cache=False).logits[0, len(sample.prompt_ids) - 1 : -1] / TEMPERATURE
    assert logits.dtype == torch.float64
    logs = torch.log_softmax(logits, -1)
    assert logs.shape[1] >= VOCAB
    return logs[range(len(sample.completion_ids)), list(sample.completion_ids)], logs


def _mixed(model: Any, samples: list[Any]) -> torch.Tensor:
    """Loss of a mini-batch by `engine_batches.mixed`, written out once more."""
    tokens = sum(len(sample.completion_ids) for sample in samples)
    loss = torch.zeros((), dtype=torch.float64)
    for sample in samples:
        chosen, logs = _chosen(model, sample)
        advantage = float(torch.tensor(sample.advantage))  # in float32, in which it travels
        loss = (
            loss
            - advantage * chosen.sum() / tokens
            + chosen.square().mean() / len(samples)
            + (logs.exp() * logs).sum() / 50
        )
    return loss


if __name__ == "__main__":
    sys.path.insert(0, str(PEFT))
    serve(Oracle(), int(sys.argv[1]))
