"""Loading a Hugging Face model: every rank reads the slices that it holds, and nothing else."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch

from weightlane.ckpt_engines import ConfigError

from ..hf.names import CheckpointRun
from ..hf.stored_slices import Shelf, hf_tensors
from .shards import local_shards


def model_without_weights(model_dir: Path) -> torch.nn.Module:
    """The model of ``config.json`` with its parameters on the meta device, and its buffers on the CPU."""
    from transformers import AutoConfig, AutoModelForCausalLM  # noqa: PLC0415 - optional, and slow to import

    try:
        with _parameters_on_meta():
            config = AutoConfig.from_pretrained(model_dir, local_files_only=True)
            model: torch.nn.Module = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    except (OSError, RuntimeError, ValueError) as cause:
        raise ConfigError(f"the model in {model_dir} cannot be built: {cause}", part="model") from cause
    model.tie_weights()  # type: ignore[operator]  # of transformers' PreTrainedModel
    return model.eval()


def can_read_slices(model: torch.nn.Module, model_dir: Path, runs: Sequence[CheckpointRun]) -> bool:
    """Whether the files in `model_dir` hold exactly the tensors `runs` that `model` would be saved as.

    They don't where transformers converts older formats on loading; `whole_model` does that.
    """
    held = {name: entry.box.shape for name, entry in hf_tensors(model_dir).items()}
    for tied in getattr(model, "_tied_weights_keys", None) or ():
        if tied not in {run.name for run in runs}:
            held.pop(tied, None)
    return held == {run.name: run.shape for run in runs}


def read_slices(model_dir: Path, runs: Sequence[CheckpointRun], tensors: Mapping[str, torch.Tensor]) -> None:
    """Fill what this rank holds of `tensors`, by in-memory name, from the files in `model_dir`."""
    with Shelf({name: [entry] for name, entry in hf_tensors(model_dir).items()}) as shelf:
        for shard in local_shards(runs, tensors, rank=0, dtype=None, kept=()):
            shelf.read(shard.spec.name, shard.box, shard.data)


def materialise(model: torch.nn.Module, device: torch.device) -> None:
    """Give parameters on the meta device memory on `device`, uninitialised, and move the rest there. Tied ones stay tied."""
    made: dict[torch.nn.Parameter, torch.nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None and parameter.is_meta:
                if parameter not in made:
                    empty = torch.empty_like(parameter, device=device)
                    made[parameter] = torch.nn.Parameter(empty, parameter.requires_grad)
                module._parameters[name] = made[parameter]
    model.to(device)  # also tells FSDP of the new parameters


@contextmanager
def _parameters_on_meta() -> Iterator[None]:
    """Have modules that are made here put their parameters on the meta device; buffers stay as they are computed."""
    register = torch.nn.Module.register_parameter

    def on_meta(module: torch.nn.Module, name: str, parameter: torch.nn.Parameter | None) -> None:
        if parameter is not None and not parameter.is_meta:
            parameter = torch.nn.Parameter(parameter.detach().to("meta"), parameter.requires_grad)
        register(module, name, parameter)

    torch.nn.Module.register_parameter = on_meta  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        torch.nn.Module.register_parameter = register  # type: ignore[method-assign]


def whole_model(model_dir: Path) -> torch.nn.Module:
    """The model in `model_dir` in float32, loaded by transformers, which converts older formats. Takes memory for all of it."""
    from transformers import AutoModelForCausalLM  # noqa: PLC0415 - optional, and slow to import
    from transformers.utils import logging as transformers_logging  # noqa: PLC0415 - as above

    transformers_logging.disable_progress_bar()
    try:
        model, report = AutoModelForCausalLM.from_pretrained(
            model_dir, dtype=torch.float32, local_files_only=True, output_loading_info=True
        )
    except (OSError, RuntimeError, ValueError) as cause:
        raise ConfigError(
            f"the model in {model_dir} cannot be loaded: {cause}", part="model", hint="Check or fetch it again."
        ) from cause
    for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        if names := sorted(str(item) for item in report.get(kind) or ()):
            raise ConfigError(
                f"the weights in {model_dir} do not fit their config.json: {kind.replace('_', ' ')} {', '.join(names[:5])}"
                f"{' and more' if len(names) > 5 else ''}.",  # noqa: PLR2004 - enough names to recognise the pattern
                part="model",
                hint="Fetch the model again, or repair its config.json.",
            )
    loaded: torch.nn.Module = model.eval()
    return loaded
