"""PEFT over plain transformers in float64, in one process: the account of adapters that ours are compared with.

    python peft_oracle.py PIPE ...

It answers commands as `engine_worker` does. PEFT and accelerate have a folder of their own (see .ci/setup-env): beside everything
else, they would change how transformers loads models.
"""

from __future__ import annotations

import sys
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

    def logprobs(self, model: str, adapter: str | None, rows: int, *, every_token: bool = False) -> dict[int, Any]:
        """float64 log-probabilities at each token of a completion, of the token or of every one, by sample."""
        computed, _ = _adapted(model, adapter)
        with torch.no_grad():
            found = [_chosen(computed, sample) for sample in make_samples(0, rows)]
        return {row: each[every_token].numpy() for row, each in enumerate(found)}

    def gradient(self, model: str, adapter: str, rows: int) -> tuple[float, dict[str, Any]]:
        """Loss of a mini-batch by `engine_batches.mixed`, written out once more; gradients by ``module|A`` or ``module|B``."""
        computed, matrices = _adapted(model, adapter)
        samples = make_samples(0, rows)
        tokens = sum(len(sample.completion_ids) for sample in samples)
        loss = torch.zeros((), dtype=torch.float64)
        for sample in samples:
            chosen, logs = _chosen(computed, sample)
            advantage = float(torch.tensor(sample.advantage))  # in float32, in which it travels
            loss = (
                loss
                - advantage * chosen.sum() / tokens
                + chosen.square().mean() / rows
                + (logs.exp() * logs).sum() / 50
            )
        loss.backward()
        return float(loss.detach()), {key: matrix.grad.numpy() for key, matrix in matrices.items()}

    def merged(self, model: str, adapter: str) -> dict[str, Any]:
        """float64 weights with the adapter merged, by name."""
        computed, _ = _adapted(model, adapter)
        return {name: tensor.numpy() for name, tensor in computed.merge_and_unload().state_dict().items()}


def _model(path: str, dtype: torch.dtype) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(path, dtype=dtype).eval()


def _adapted(path: str, adapter: str | None) -> tuple[Any, dict[str, torch.Tensor]]:
    """The model with an adapter, everything in float64, and the adapter's A and B."""
    model = _model(path, torch.float64)
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


if __name__ == "__main__":
    sys.path.insert(0, str(PEFT))
    serve(Oracle(), int(sys.argv[1]))
