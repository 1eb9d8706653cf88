"""A transformers model and its checkpoint: built without weights, its tensors under their names on disk, and files read into it.

transformers fuses some tensors on loading (such as the experts of a mixture of experts) and splits them again on saving. The
rollout expects the names on disk. transformers' own reverse conversion is therefore run once, on tensors of the meta device, and
each result is recognised as a view of the parameter it came from. Nothing is allocated or copied.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from weightlane.ckpt_engines import ConfigError

from .heads import value_head
from .stored_slices import SliceReader, StoredSlice, TrainedSlice, copy_exactly, hf_tensors, some_of

_ONE_AT_A_TIME = threading.Lock()
_SETTINGS: dict[str, dict[str, Any]] = {"tokens": {}, "value": {"num_labels": 1}}
"""Settings in addition to those of ``config.json``, by head."""
_WRAPPERS = frozenset({"_orig_mod", "_checkpoint_wrapped_module"})
"""Components that ``torch.compile`` and activation checkpointing add to the names of the modules they wrap."""


@dataclass(frozen=True, slots=True)
class CheckpointRun:
    """One checkpoint tensor as a contiguous run of an in-memory tensor."""

    name: str
    """Name on disk."""
    shape: tuple[int, ...]
    source: str
    """Name of the parameter or buffer in memory."""
    offset: int
    """First element within the row-major flattened source."""

    def within(self, source: torch.Tensor) -> torch.Tensor:
        """Return the view of this tensor in the whole `source`."""
        return source.flatten()[self.offset : self.offset + torch.Size(self.shape).numel()].view(self.shape)


class _CopiesAreViews(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch leaves its __init_subclass__ untyped
    """Makes ``contiguous()`` and ``clone()`` return their argument, so that a slice stays a view of its source."""

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.clone.default:
            return args[0]
        return func(*args, **(kwargs or {}))


def checkpoint_runs(model: torch.nn.Module, tensors: Mapping[str, torch.Tensor]) -> list[CheckpointRun]:
    """List the checkpoint tensors as which `tensors` (in-memory names, tied ones once) are saved, in the order of `tensors`.

    Raises `ConfigError` naming the tensor that is not saved as contiguous runs, but for example as a transpose.
    """
    from transformers.core_model_loading import revert_weight_conversion  # noqa: PLC0415 - optional, slow to import

    shadows = {name: torch.empty(tensor.shape, dtype=tensor.dtype, device="meta") for name, tensor in tensors.items()}
    sources = {shadow.untyped_storage()._cdata: name for name, shadow in shadows.items()}
    position = {name: index for index, name in enumerate(shadows)}
    with _CopiesAreViews():  # type: ignore[no-untyped-call]  # torch leaves the base class's __init__ untyped
        saved: dict[str, torch.Tensor] = revert_weight_conversion(model, dict(shadows))
    runs = []
    for name, tensor in saved.items():
        source = sources.get(tensor.untyped_storage()._cdata)
        if source is None or not tensor.is_contiguous():
            raise ConfigError(
                f"transformers saves {name} in a form that is not a contiguous part of one parameter.",
                part="model",
                hint="This architecture's weights cannot be published yet; use one whose checkpoint layout is plain.",
            )
        runs.append(CheckpointRun(name, tuple(tensor.shape), source, int(tensor.storage_offset())))
    covered = dict.fromkeys(shadows, 0)
    for run in runs:
        covered[run.source] += torch.Size(run.shape).numel()
    for name, shadow in shadows.items():
        if covered[name] != shadow.numel():
            raise ConfigError(f"transformers does not save all of {name}.", part="model")
    return sorted(runs, key=lambda run: (position[run.source], run.offset))


def checkpoint_tensors(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return parameters and persistent buffers by in-memory name without wrappers' components; tied ones once, first name."""
    saved = model.state_dict(keep_vars=True).keys()
    named = dict(model.named_parameters())
    found = {**named, **{name: buffer for name, buffer in model.named_buffers() if name in saved}}
    return {plain_name(name): tensor for name, tensor in found.items()}


def plain_name(name: str) -> str:
    """Return the name of a tensor without the components of wrappers."""
    return ".".join(part for part in name.split(".") if part not in _WRAPPERS)


def model_without_weights(model_dir: Path, head: str = "tokens") -> torch.nn.Module:
    """Build the model of ``config.json`` with its parameters on the meta device, and its buffers on the CPU.

    Raises `ConfigError` if transformers cannot build it with the ``TrainerConfig.head`` `head`.
    """
    from transformers import AutoConfig  # noqa: PLC0415 - optional, and slow to import

    try:
        with _parameters_on_meta():
            config = AutoConfig.from_pretrained(model_dir, local_files_only=True, **_SETTINGS[head])
            model: torch.nn.Module = _model_class(head).from_config(config, dtype=torch.float32)
    except (OSError, RuntimeError, ValueError) as cause:
        raise ConfigError(
            f"the model in {model_dir} cannot be built with the head trainer.head={head}: {cause}", part="model"
        ) from cause
    model.tie_weights()  # type: ignore[operator]  # of transformers' PreTrainedModel
    return model.eval()


def _model_class(head: str) -> Any:
    """Return transformers' class of models with the head ``TrainerConfig.head``."""
    from transformers import AutoModelForCausalLM, AutoModelForTokenClassification  # noqa: PLC0415 - as above

    return AutoModelForTokenClassification if head == "value" else AutoModelForCausalLM


@contextmanager
def _parameters_on_meta() -> Iterator[None]:
    """Put the parameters of modules built in this context on the meta device; buffers are computed as usual.

    This applies to all threads of the process while the context is open, so a lock admits one of them at a time.
    """

    def on_meta(module: torch.nn.Module, name: str, parameter: torch.nn.Parameter | None) -> None:
        if parameter is not None and not parameter.is_meta:
            parameter = torch.nn.Parameter(parameter.detach().to("meta"), parameter.requires_grad)
            parameter._is_hf_initialized = True  # type: ignore[attr-defined]  # it has no values that could be drawn
        register(module, name, parameter)

    with _ONE_AT_A_TIME:
        register = torch.nn.Module.register_parameter  # not before: another thread may have replaced it until now
        torch.nn.Module.register_parameter = on_meta  # type: ignore[method-assign, assignment]
        try:
            yield
        finally:
            torch.nn.Module.register_parameter = register  # type: ignore[method-assign]


def stored_weights(
    model: torch.nn.Module, model_dir: Path, head: str, shapes: Mapping[str, tuple[int, ...]]
) -> dict[str, StoredSlice] | None:
    """Return the tensors in the files of `model_dir`, if they are those as which `model`, which has `shapes`, would be saved.

    Files may also hold other heads, and layers that predict further tokens, and need not hold a value head. Returns None if
    transformers may convert what they hold, an older format, into those tensors: `whole_model` then loads or refuses them.

    Raises the `ConfigError` of `whole_model` if headers show that the files are of another model: by a tensor of another shape,
    or by missing ones if nothing is there that could be converted into them.
    """
    stored = hf_tensors(model_dir)
    further = {name.removesuffix("eh_proj.weight") for name in stored if name.endswith(".eh_proj.weight")}
    unused = ("mtp.", *further, *(getattr(model, "_tied_weights_keys", None) or ()))
    held = {name for name in stored if name in shapes or not name.startswith(unused)}
    wanted = set(shapes)
    if head == "value":
        body, own = f"{model.base_model_prefix}.", f"{value_head(model)[0]}."
        held = {name for name in held if name.startswith((body, own))}
        wanted = {name for name in wanted if name in held or not name.startswith(own)}
    _refuse_names(
        model_dir, "mismatched_keys", (name for name in wanted & held if stored[name].box.shape != shapes[name])
    )
    if held < wanted and (held or head == "tokens"):  # files of a model without a head may lack the prefix of its body
        excused = getattr(model, "_keys_to_ignore_on_load_missing", None) or ()
        missing = (name for name in wanted - held if not any(re.search(each, name) for each in excused))
        _refuse_names(model_dir, "missing_keys", missing)
    return stored if held == wanted else None


def weights_reader(
    model_dir: Path, head: str, shapes: Mapping[str, tuple[int, ...]]
) -> Callable[[Iterable[TrainedSlice]], None]:
    """Return a function that fills slices of the checkpoint tensors `shapes` with the weights in `model_dir`.

    It reads no other element, unless transformers has to convert the files. A value head that they don't hold is zeros.

    Raises `ConfigError` if the directory is of another model.
    """
    model = model_without_weights(model_dir, head)
    runs = checkpoint_runs(model, checkpoint_tensors(model))
    if {run.name: run.shape for run in runs} != shapes:
        raise ConfigError(f"the weights in {model_dir} are of another model.", part="model", hint="Check the path.")
    stored = stored_weights(model, model_dir, head, shapes)  # broken headers are found before any rank reads
    whole = checkpoint_tensors(whole_model(model_dir, head)) if stored is None else {}
    by_name = {run.name: run for run in runs}

    @torch.no_grad()
    def fill(slices: Iterable[TrainedSlice]) -> None:
        with SliceReader({name: [entry] for name, entry in (stored or {}).items()}) as reader:
            for piece in slices:
                if stored is None:
                    run = by_name[piece.name]
                    copy_exactly(run.within(whole[run.source])[piece.box.index], piece.weight, piece.name)
                elif piece.name in stored:
                    reader.read(piece.name, piece.box, piece.weight)
                else:
                    piece.weight.zero_()

    return fill


def _refuse_names(model_dir: Path, kind: str, found: Iterable[str]) -> None:
    """Raise `ConfigError` if `found` is not empty; `kind` is the key of such tensors in transformers' loading report."""
    if names := set(found):
        raise ConfigError(
            f"the weights in {model_dir} do not fit their config.json: {kind.replace('_', ' ')} {some_of(names)}.",
            part="model",
            hint="Fetch the model again, or repair its config.json.",
        )


def whole_model(model_dir: Path, head: str = "tokens") -> torch.nn.Module:
    """Load all of the model in `model_dir` into memory, in float32, with transformers, which converts older formats.

    A value head that the files don't hold is zeros.
    """
    from transformers.utils import logging as transformers_logging  # noqa: PLC0415 - as above

    transformers_logging.disable_progress_bar()
    try:
        model, report = _model_class(head).from_pretrained(
            model_dir, dtype=torch.float32, local_files_only=True, output_loading_info=True, **_SETTINGS[head]
        )
    except (OSError, RuntimeError, ValueError, ImportError) as cause:
        raise ConfigError(
            f"the model in {model_dir} cannot be loaded: {cause}", part="model", hint="Check or fetch it again."
        ) from cause
    if coded := [name for name, each in model.named_parameters() if each.dtype != torch.float32]:
        raise ConfigError(
            f"the weights in {model_dir} are quantised, and transformers keeps them so: {some_of(coded)}.",
            part="model",
            hint="Train a checkpoint in bfloat16 or float32.",
        )
    if head == "value":
        own, module = value_head(model)
        inside = (f"{model.base_model_prefix}.", f"{own}.")
        report["unexpected_keys"] = {name for name in report["unexpected_keys"] if str(name).startswith(inside)}
        for name, parameter in module.named_parameters():
            if f"{own}.{name}" in report["missing_keys"]:
                torch.nn.init.zeros_(parameter)
        report["missing_keys"] = {name for name in report["missing_keys"] if not str(name).startswith(f"{own}.")}
    for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"):
        _refuse_names(model_dir, kind, map(str, report.get(kind) or ()))
    loaded: torch.nn.Module = model.eval()
    return loaded
