"""Build and load a Hugging Face model: every rank reads only the slices that it holds."""

from __future__ import annotations

import re
import threading
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from weightlane.ckpt_engines import ConfigError

from ...config import TrainerConfig
from ..hf.context_split import check_context
from ..hf.heads import causal_head, unused_heads, value_head
from ..hf.model_dir import half_precision, stored_types
from ..hf.names import CheckpointRun, checkpoint_runs
from ..hf.stored_slices import SliceReader, StoredSlice, copy_exactly, hf_tensors, refuse_weights, some_of
from .lora import check_adapter
from .mesh import check_mesh, parallel_styles
from .router_replay import expert_blocks
from .shards import checkpoint_tensors, local_shards

_ONE_AT_A_TIME = threading.Lock()
_SETTINGS: dict[str, dict[str, Any]] = {"tokens": {}, "value": {"num_labels": 1}}
"""Settings in addition to those of ``config.json``, by head."""


def checked_model(config: TrainerConfig, model_dir: Path) -> torch.nn.Module:
    """Return the model in `model_dir` with its parameters on the meta device.

    Raises:
        ConfigError: transformers cannot build it, the files hold other weights, it lacks the head that `config` asks for, its
            matrices or tokens cannot be split over the ranks, or it lacks a layer that the adapter of ``trainer.lora`` needs.
    """
    check_mesh(config, model_dir)
    model = model_without_weights(model_dir, config.head)
    if config.head == "value":
        value_head(model)
    else:
        causal_head(model)
    refuse_other_weights(model, model_dir, config.head)
    if config.fsdp2.tensor_parallel > 1:
        parallel_styles(model)
    check_context(config, model)
    if config.router_replay:
        expert_blocks(model, decoder_layers(model))
    if config.lora is not None:
        runs = checkpoint_runs(model, checkpoint_tensors(model))
        check_adapter(model, decoder_layers(model), runs, config.lora)
    return model


def decoder_layers(model: torch.nn.Module) -> list[torch.nn.Module]:
    """Return the blocks that transformers says must not be split, or else the members of the longest module list."""
    kept_whole = set(getattr(model, "_no_split_modules", None) or ())
    lists = [module for module in model.modules() if isinstance(module, torch.nn.ModuleList) and len(module)]
    layers = [layer for blocks in lists for layer in blocks if type(layer).__name__ in kept_whole]
    return layers or max((list(blocks) for blocks in lists), key=len, default=[])


def model_without_weights(model_dir: Path, head: str = "tokens") -> torch.nn.Module:
    """Build the model of ``config.json`` with its parameters on the meta device, and its buffers on the CPU.

    Raises `ConfigError` if transformers cannot build it with the ``TrainerConfig.head`` `head`.
    """
    from transformers import AutoConfig  # noqa: PLC0415 - optional, and slow to import

    try:
        with _parameters_on_meta():
            config = AutoConfig.from_pretrained(model_dir, local_files_only=True, **_SETTINGS[head])
            model: torch.nn.Module = model_class(head).from_config(config, dtype=torch.float32)
    except (OSError, RuntimeError, ValueError) as cause:
        raise ConfigError(
            f"the model in {model_dir} cannot be built with the head trainer.head={head}: {cause}", part="model"
        ) from cause
    model.tie_weights()  # type: ignore[operator]  # of transformers' PreTrainedModel
    return model.eval()


def model_class(head: str) -> Any:
    """Return transformers' class of models with the head ``TrainerConfig.head``."""
    from transformers import AutoModelForCausalLM, AutoModelForTokenClassification  # noqa: PLC0415 - as above

    return AutoModelForTokenClassification if head == "value" else AutoModelForCausalLM


def can_read_slices(model: torch.nn.Module, model_dir: Path, runs: Sequence[CheckpointRun], new: str = "") -> bool:
    """Return whether the files in `model_dir` hold exactly the tensors `runs` as which `model` would be saved.

    They don't if transformers converts an older format on loading; `whole_model` loads those. `new` names a head that may be
    missing, while files may hold others.
    """
    held = {name: entry.box.shape for name, entry in hf_tensors(model_dir).items()}
    wanted = {run.name: run.shape for run in runs}
    for tied in getattr(model, "_tied_weights_keys", None) or ():
        if tied not in wanted:
            held.pop(tied, None)
    if new:
        for name in unused_heads(held, model, new):
            del held[name]
        wanted = {name: shape for name, shape in wanted.items() if name in held or not name.startswith(f"{new}.")}
    return held == wanted


def refuse_other_weights(model: torch.nn.Module, model_dir: Path, head: str = "tokens") -> None:
    """Raise the `ConfigError` of `whole_model` if the headers show that the files in `model_dir` are not those of `model`.

    They show a tensor with another shape. They show missing tensors only if the files hold nothing that transformers could
    convert into them. A value head may be missing, and files may hold another head.
    """
    held = {name: entry.box.shape for name, entry in hf_tensors(model_dir).items()}
    wanted = {run.name: run.shape for run in checkpoint_runs(model, checkpoint_tensors(model))}
    if head == "value":
        own = f"{value_head(model)[0]}."
        wanted = {name: shape for name, shape in wanted.items() if not name.startswith(own)}
    _refuse_names(
        model_dir, "mismatched_keys", (name for name, shape in wanted.items() if held.get(name, shape) != shape)
    )
    if head == "tokens" and held.keys() <= wanted.keys():
        excused = getattr(model, "_keys_to_ignore_on_load_missing", None) or ()
        missing = wanted.keys() - held.keys()
        _refuse_names(
            model_dir, "missing_keys", (name for name in missing if not any(re.search(each, name) for each in excused))
        )


def _refuse_names(model_dir: Path, kind: str, found: Iterable[object]) -> None:
    """Raise `ConfigError` if `found` is not empty; `kind` is the key of such tensors in transformers' loading report."""
    if names := set(map(str, found)):
        refuse_weights(model_dir, f"{kind.replace('_', ' ')} {some_of(names)}")


def read_slices(model_dir: Path, runs: Sequence[CheckpointRun], tensors: Mapping[str, torch.Tensor]) -> None:
    """Fill this rank's slices of `tensors`, by in-memory name, from the files in `model_dir`."""
    _read(hf_tensors(model_dir), runs, tensors)


def _read(
    stored: Mapping[str, StoredSlice], runs: Sequence[CheckpointRun], tensors: Mapping[str, torch.Tensor]
) -> None:
    with SliceReader({name: [entry] for name, entry in stored.items()}) as reader:
        for shard in local_shards(runs, tensors, rank=0, dtype=None, kept=()):
            reader.read(shard.spec.name, shard.box, shard.data)


def weights_reader(
    model_dir: Path, head: str, runs: Sequence[CheckpointRun], tensors: Mapping[str, torch.Tensor]
) -> Callable[[], None]:
    """Return a function that fills this rank's slices of `tensors`, by in-memory name, with the weights in `model_dir`.

    A value head that the files don't hold is zeros. Raises `ConfigError` if the directory is of another model than `runs`.
    """
    model = model_without_weights(model_dir, head)
    found = checkpoint_runs(model, checkpoint_tensors(model))
    if {run.name: run.shape for run in found} != {run.name: run.shape for run in runs}:
        raise ConfigError(f"the weights in {model_dir} are of another model.", part="model", hint="Check the path.")
    if can_read_slices(model, model_dir, runs):
        stored = hf_tensors(model_dir)  # broken headers are found before any rank reads
        return lambda: _read(stored, runs, tensors)
    whole = checkpoint_tensors(whole_model(model_dir, head))
    by_name = {shard.spec.name: shard.data for shard in local_shards(found, whole, rank=0, dtype=None, kept=())}

    def copy() -> None:
        with torch.no_grad():
            for shard in local_shards(runs, tensors, rank=0, dtype=None, kept=()):
                copy_exactly(by_name[shard.spec.name][shard.box.index], shard.data, shard.spec.name)

    return copy


def hold_as_stored(model: torch.nn.Module, model_dir: Path) -> None:
    """Give the parameters of a model that is not trained the half-precision dtype in which `model_dir` has them.

    Layers compute as with float32 copies: FSDP converts a parameter, exactly or with one rounding, when it is gathered. Call it
    before the model is sharded.
    """
    stored, found = stored_types(model_dir), defaultdict[str, list[torch.dtype | None]](list)
    for run in checkpoint_runs(model, checkpoint_tensors(model)):
        found[run.source].append(stored.get(run.name))
    for name, parameter in model.named_parameters():
        parameter.data = parameter.data.to(half_precision(found[name]))


def materialise(model: torch.nn.Module, device: torch.device) -> None:
    """Allocate the parameters that are on the meta device on `device`, uninitialised, and move the others there.

    Tied parameters stay tied.
    """
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
    """Put the parameters of modules built in this context on the meta device; buffers are computed as usual.

    This applies to all threads of the process while the context is open, so a lock admits one of them at a time.
    """

    def on_meta(module: torch.nn.Module, name: str, parameter: torch.nn.Parameter | None) -> None:
        if parameter is not None and not parameter.is_meta:
            parameter = torch.nn.Parameter(parameter.detach().to("meta"), parameter.requires_grad)
        register(module, name, parameter)

    with _ONE_AT_A_TIME:
        register = torch.nn.Module.register_parameter  # not before: another thread may have replaced it until now
        torch.nn.Module.register_parameter = on_meta  # type: ignore[method-assign, assignment]
        try:
            yield
        finally:
            torch.nn.Module.register_parameter = register  # type: ignore[method-assign]


def whole_model(model_dir: Path, head: str = "tokens") -> torch.nn.Module:
    """Load all of the model in `model_dir` into memory, in float32, with transformers, which converts older formats.

    A value head that the files don't hold is zeros.
    """
    from transformers.utils import logging as transformers_logging  # noqa: PLC0415 - as above

    transformers_logging.disable_progress_bar()
    try:
        model, report = model_class(head).from_pretrained(
            model_dir, dtype=torch.float32, local_files_only=True, output_loading_info=True, **_SETTINGS[head]
        )
    except (OSError, RuntimeError, ValueError) as cause:
        raise ConfigError(
            f"the model in {model_dir} cannot be loaded: {cause}", part="model", hint="Check or fetch it again."
        ) from cause
    if head == "value":
        own, module = value_head(model)
        unused = unused_heads(map(str, report["unexpected_keys"]), model, own)
        report["unexpected_keys"] = set(report["unexpected_keys"]) - unused
        for name, parameter in module.named_parameters():
            if f"{own}.{name}" in report["missing_keys"]:
                torch.nn.init.zeros_(parameter)
        report["missing_keys"] = {name for name in report["missing_keys"] if not str(name).startswith(f"{own}.")}
    for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        _refuse_names(model_dir, kind, report.get(kind) or ())
    loaded: torch.nn.Module = model.eval()
    return loaded
