"""What ``weightlane layout`` shows: where a model's tensors go on each rank, and what does not go by copies."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from weightlane.ckpt_engines import (
    ConfigError,
    DeadlineExceededError,
    WeightlaneError,
    WorkerDiedError,
    as_weightlane_error,
    error_from_wire,
)
from weightlane.sync import Expectation

from ..expectation import expectation_of
from ..weight_loading import refuse_unsupported
from .acceptance import Way, judge
from .coverage import target_coverage, unused_elements
from .layout_map import LayoutMap, SourceSpec
from .needs import needed_boxes
from .rank_models import engine_config, model_of_rank, quiet_vllm
from .trace import trace_loading

_PART = "layout"
_DTYPES = ("auto", "float32", "bfloat16", "float16")


def layout_report(
    model: str,
    *,
    tensor_parallel: int,
    dtype: str = "auto",
    expert_parallel: bool = False,
    timeout_s: float = 600.0,
) -> dict[str, Any]:
    """Find out in a process of its own where the tensors of `model` go; needs vLLM and neither a GPU nor the memory for weights.

    The verdict is that of a worker before its first version. A worker also compares what copies and vLLM's own loading make of
    that version, parameters and computed values, and goes back to loading where they differ.

    Args:
        model: Checkpoint directory, or the name of a model whose files are on this machine.
        tensor_parallel: Ranks of a replica.
        dtype: Data type the replica computes in, and in which tensors are sent; ``auto`` takes the checkpoint's.
        expert_parallel: Whether experts are divided between the ranks by number.
        timeout_s: Longest time it may take.

    Returns:
        Plain data: ``model``, ``architecture``, ``dtype``, ``tensor_parallel``, ``expert_parallel``, ``way``, ``tied``,
        ``union`` (over ranks: ``tensors``, ``elements``, ``unused``) and ``ranks``, each with ``rank``, ``way``, ``tensors``,
        ``slices``, ``bytes``, ``needed_elements`` (of the checkpoint), ``experts`` (for each kind of layer that has any:
        ``held``, their numbers, and ``of``, how many there are), ``constants``, ``constant_elements``, ``parameters``,
        ``reloaded`` (layers), ``refused`` and ``learned_s``.

    Raises:
        ConfigError: There is no such model, its files are broken, or vLLM cannot run it so.
        DeadlineExceededError: It took longer than `timeout_s`.
        WorkerDiedError: The process ended without an answer.
    """
    if tensor_parallel < 1:
        raise ConfigError(
            f"{tensor_parallel} ranks are not at least one.", part=_PART, hint="Give --tp a number from 1."
        )
    if expert_parallel and tensor_parallel == 1:
        raise ConfigError("expert parallelism needs more than one rank.", part=_PART, hint="Give --tp a number from 2.")
    if dtype not in _DTYPES:
        raise ConfigError(f"{dtype!r} is none of {', '.join(_DTYPES)}.", part=_PART, hint="Choose one for --dtype.")
    path = Path(model)
    name = str(path.resolve()) if path.exists() else model
    asked = {"model": name, "tensor_parallel": tensor_parallel, "dtype": dtype, "expert_parallel": expert_parallel}
    arguments = json.dumps(asked)
    try:
        ended = subprocess.run(  # noqa: S603 - our own module
            [sys.executable, "-m", __name__, arguments],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=timeout_s,
            check=False,
        )
    except subprocess.TimeoutExpired as cause:
        raise DeadlineExceededError(f"the layout of {model} was not found in {timeout_s:.0f} s.", part=_PART) from cause
    try:
        answer = json.loads(ended.stdout)
    except ValueError as cause:
        last = ended.stderr.decode(errors="replace").strip().splitlines()[-1:] or ["nothing was said"]
        raise WorkerDiedError(
            f"the process that builds the model ended with {ended.returncode}: {last[0]}", part=_PART
        ) from cause
    if "error" in answer:
        raise error_from_wire(answer["error"])
    report: dict[str, Any] = answer["report"]
    return report


def make_report(model: str, *, tensor_parallel: int, dtype: str, expert_parallel: bool = False) -> dict[str, Any]:
    """`layout_report` in this process, which must not have built a vLLM model before."""
    layouts: list[LayoutMap] = []
    seconds: list[float] = []
    experts: list[list[dict[str, Any]]] = []
    verdicts = []
    config = _checked_config(model, tensor_parallel, dtype, expert_parallel=expert_parallel)
    expectation = expectation_of(
        model,
        dtype=config.model_config.dtype,
        tied_embeddings=bool(getattr(config.model_config.hf_text_config, "tie_word_embeddings", False)),
    )
    sources = sent_tensors(expectation, config.model_config.dtype)
    for rank in range(tensor_parallel):
        with model_of_rank(config, rank) as built:
            refuse_unsupported(built, config, config.device_config.device)
            began = time.perf_counter()
            layouts.append(trace_loading(built, sources))
            seconds.append(time.perf_counter() - began)
            experts.append(held_experts(built))
    for rank in range(tensor_parallel):
        with model_of_rank(config, rank) as built:
            verdicts.append(judge(built, layouts[rank], layouts, tied=expectation.tied))
    ways = {verdict.way for verdict in verdicts}
    excused = {source for layout in layouts for source, _ in layout.feeds}
    excused |= {refusal.tensor for layout in layouts for refusal in layout.refused_sources}
    unused = {name: count for name, count in unused_elements(layouts).items() if name not in excused}
    return {
        "model": model,
        "architecture": ", ".join(config.model_config.architectures),
        "dtype": str(config.model_config.dtype).removeprefix("torch."),
        "tensor_parallel": tensor_parallel,
        "expert_parallel": expert_parallel,
        "way": next(way for way in (Way.RELOAD, Way.MIXED, Way.TRACED) if way in ways),
        "tied": sorted(expectation.tied),
        "union": {
            "tensors": len(sources),
            "elements": sum(spec.numel for spec in sources.values()),
            "unused": unused,
        },
        "ranks": [
            {
                "rank": rank,
                "way": verdict.way,
                "tensors": len({piece.source for piece in layout.slices}),
                "slices": len(layout.slices),
                "bytes": layout.bytes_copied,
                "needed_elements": sum(box.numel for boxes in needed_boxes(layout).values() for box in boxes),
                "experts": held,
                "parameters": len(layout.targets),
                "constants": len(layout.constants),
                "constant_elements": sum(counts.constant for counts in target_coverage(layout).values()),
                "reloaded": list(verdict.modules),
                "refused": [{"tensor": reason.tensor, "why": reason.why} for reason in verdict.reasons],
                "learned_s": learned_s,
            }
            for rank, (layout, verdict, learned_s, held) in enumerate(
                zip(layouts, verdicts, seconds, experts, strict=True)
            )
        ],
    }


def sent_tensors(expectation: Expectation, dtype: Any) -> dict[str, SourceSpec]:
    """What a version is made of that is sent in `dtype` where that may be, aliases left out."""
    return {
        name: SourceSpec(expected.shape, dtype if dtype in expected.dtypes else next(iter(expected.dtypes)))
        for name, expected in expectation.tensors.items()
        if name not in expectation.tied
    }


def held_experts(model: torch.nn.Module) -> list[dict[str, Any]]:
    """Which experts a rank's model has, as ``held`` and ``of``: once for all layers that have the same, nothing for none."""
    from vllm.model_executor.layers.fused_moe import RoutedExperts  # noqa: PLC0415 - in a process that runs vLLM

    found: list[dict[str, Any]] = []
    for layer in model.modules():
        if isinstance(layer, RoutedExperts):
            count, local = layer.global_num_experts, layer.expert_map
            held = list(range(count)) if local is None else (local >= 0).nonzero().flatten().tolist()
            entry = {"held": held, "of": count}
            if entry not in found:
                found.append(entry)
    return found


def _checked_config(model: str, tensor_parallel: int, dtype: str, *, expert_parallel: bool) -> Any:
    # The headers come first, and tell most of what can be wrong.
    expectation_of(model, dtype=torch.float32, tied_embeddings=False)
    quiet_vllm()
    return engine_config(model, tensor_parallel=tensor_parallel, dtype=dtype, expert_parallel=expert_parallel)


def _main(arguments: Mapping[str, Any]) -> dict[str, Any]:
    try:
        return {"report": make_report(**arguments)}
    except WeightlaneError as error:
        return {"error": error.to_wire()}
    except Exception as cause:  # noqa: BLE001 - whatever vLLM and the model raise, the other process is told
        return {"error": as_weightlane_error(cause, _PART).to_wire()}


if __name__ == "__main__":
    # Libraries print; the answer goes where nothing else does.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    json.dump(_main(json.loads(sys.argv[1])), answers)
    answers.close()
