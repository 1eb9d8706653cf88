"""Steps of clients of the SDK, and the tensors that they end with."""

from __future__ import annotations

from typing import Any

import torch
from float64_reference import sequences
from safetensors.torch import load_file
from service_process import ServiceProcess, datums
from tiny_models import load_tensors
from waiting import HANG_S

from weightlane.trainer.engines.fsdp2.engine import Fsdp2Engine

ADAM = {"beta1": 0.9, "beta2": 0.98, "eps": 1e-2, "weight_decay": 0.1, "grad_clip_norm": 0.5}
"""With an eps by which steps do not make much of gradients next to 0, which are rounding."""


def data(seed: int, count: int = 4) -> list[Any]:
    return datums(sequences(seed, count))


def step(training: Any, seed: int, rate: float = 1e-2, **more: float) -> tuple[Any, Any]:
    from tinker import types

    passed = training.forward_backward(data(seed), "cross_entropy")
    stepped = training.optim_step(types.AdamParams(learning_rate=rate, **{**ADAM, **more}))
    return passed, stepped


def saved(service: ServiceProcess, training: Any, name: str) -> dict[str, torch.Tensor]:
    """The tensors of a checkpoint: an adapter's by PEFT's names, all weights by those of the model."""
    folder = service.checkpoint(training.save_state(name, overwrite=True).result(HANG_S).path)
    if (folder / "adapter_model.safetensors").is_file():
        return load_file(folder / "adapter_model.safetensors")
    exported = service.directory.with_name("-".join(folder.relative_to(service.directory).parts))
    Fsdp2Engine.export_saved(folder, service.model, exported, torch.float32)
    return load_tensors(exported)


def differing(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> list[str]:
    """Names of the tensors that are not, bit for bit, those expected."""
    assert found.keys() == expected.keys()
    return [name for name in found if not torch.equal(found[name], expected[name])]
