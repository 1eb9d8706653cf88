"""`check_replica`: what vLLM and weightlane would refuse of a replica when it starts and connects, asked before there is one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from weightlane.ckpt_engines import WeightlaneError
from weightlane.ckpt_engines.runtime.own_process import answer_asker, ask_process

from ..config import AdapterConfig, RolloutConfig
from ..layout.loading.adapter_tensors import adapted_layers, adapter_expectation
from ..layout.offline.rank_models import as_rank, quiet_vllm
from .environment import replica_config

_PART = "rollout"
_TIMEOUT_S = 600.0


def check_replica(config: RolloutConfig, model_dir: Path) -> str:
    """Raise the `ConfigError` with which a replica of `config` would refuse `model_dir` or its arguments.

    vLLM is loaded in a separate process, which builds no weights. Everything is refused by the code of the replicas themselves.

    Returns what could not be found out without weights, and why; empty if nothing.
    """
    asked = {"config": config.model_dump(mode="json"), "model_dir": str(model_dir.resolve())}
    what = f"the check of {model_dir} by vLLM"
    unknown: str = ask_process(__name__, asked, part=_PART, what=what, timeout_s=_TIMEOUT_S)
    return unknown


def find_refusal(config: dict[str, Any], model_dir: str) -> str:
    """`check_replica` in this process, which must not have built a vLLM model before."""
    quiet_vllm()
    settings = RolloutConfig.model_validate(config)
    _, vllm_config = replica_config(settings, Path(model_dir))
    return "" if settings.adapter is None else _check_adapter(vllm_config, settings.adapter)


def _check_adapter(vllm_config: Any, adapter: AdapterConfig) -> str:
    """Wrap the model for adapters, on the meta device, and raise `ConfigError` for layers that vLLM wraps no module for."""
    from ..vllm_surface import (  # noqa: PLC0415 - as above
        LoRAModelRunnerMixin,
        initialize_model,
        set_default_torch_dtype,
    )
    from .live_adapters import peft_settings, refuse_unknown_layers  # noqa: PLC0415 - imports vLLM

    model_config = vllm_config.model_config
    layers = adapted_layers(model_config.model, adapter)
    wrapper = LoRAModelRunnerMixin()
    with as_rank(vllm_config, 0):
        try:
            with set_default_torch_dtype(model_config.dtype), torch.device("meta"):
                model = initialize_model(vllm_config)
            model = wrapper.load_lora_model(model, vllm_config, torch.device("cpu"))
        except WeightlaneError:
            raise
        except Exception as cause:  # noqa: BLE001 - a model may compute with numbers while it is made
            return f"layers that vLLM has adapters for: {type(cause).__name__}: {str(cause)[:200]}"
        manager = model.lora_manager
        names = adapter_expectation(layers, adapter.rank, model_config.dtype).tensors
        refuse_unknown_layers(manager, model, names, peft_settings(manager, adapter, layers), _PART)
    return ""


if __name__ == "__main__":
    answer_asker(find_refusal, _PART)
