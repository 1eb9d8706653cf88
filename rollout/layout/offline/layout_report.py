"""The report of ``weightlane layout``: where a model's tensors go on each rank, and which tensors are not copied."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from weightlane.ckpt_engines import ConfigError
from weightlane.ckpt_engines.runtime.own_process import answer_asker, ask_process
from weightlane.ckpt_engines.runtime.process_memory import available_memory_bytes

from ..loading.checkpoint_expectation import checkpoint_specs, expectation_of_config
from ..map.coverage import Reads, target_coverage, unused_elements
from ..write_method import WriteKind
from .rank_layouts import RankLayout, rank_layouts, rehearsed
from .rank_models import engine_config

_PART = "layout"
_MODELS = 3
"""Memory that a rehearsal needs, in sizes of a rank's model: one built, one loaded, and one that vLLM repacks."""
_TIMEOUT_S = 600.0
_DTYPES = ("auto", "float32", "bfloat16", "float16")


def layout_report(
    model: str,
    *,
    tensor_parallel: int,
    dtype: str = "auto",
    expert_parallel: bool = False,
) -> dict[str, Any]:
    """Find out where the tensors of `model` go, in a separate process that needs vLLM and no GPU.

    The method is that of a replica: versions are rehearsed against ordinary loads if the models fit into free memory. If not,
    nothing is loaded, and ``not_rehearsed`` says so.

    Args:
        model: Checkpoint directory, or the name of a model whose files are on this machine.
        tensor_parallel: Ranks of a replica.
        dtype: Data type the replica computes in and tensors are sent in; ``auto`` takes the checkpoint's.
        expert_parallel: Whether experts are divided between the ranks by number.

    Returns:
        Plain data: ``model``, ``architecture``, ``dtype``, ``quantization`` (vLLM's name for it, or nothing),
        ``tensor_parallel``, ``expert_parallel``, ``method`` (a `WriteKind`), ``refusal`` (why a replica takes no versions of
        this model, or nothing), ``not_rehearsed`` (why, or nothing), ``tied``, ``unread`` (further tensors of the files,
        which no rank reads), ``union`` (over ranks: ``tensors``, ``elements``, ``unused``) and ``ranks``, each with ``rank``,
        ``method``, ``tensors``, ``copies``, ``bytes``, ``needed_elements`` (of the checkpoint), ``experts`` (for each kind of
        layer with experts: ``held``, the rank's expert numbers, and ``of``, the number of experts), ``constants``,
        ``constant_elements``, ``parameters``, ``reloaded`` (layers), ``refused`` and ``learned_s``.

    Raises:
        ConfigError: There is no such model, its files are broken, or vLLM cannot run it with these options.
        DeadlineExceededError: The process took longer than ten minutes.
        WorkerDiedError: The process ended without an answer.
    """
    if tensor_parallel < 1:
        raise ConfigError(
            f"a replica cannot have {tensor_parallel} ranks.", part=_PART, hint="Give --tp a number from 1."
        )
    if expert_parallel and tensor_parallel == 1:
        raise ConfigError("expert parallelism needs more than one rank.", part=_PART, hint="Give --tp a number from 2.")
    if dtype not in _DTYPES:
        raise ConfigError(f"{dtype!r} is none of {', '.join(_DTYPES)}.", part=_PART, hint="Choose one for --dtype.")
    path = Path(model)
    name = str(path.resolve()) if path.exists() else model
    asked = {"model": name, "tensor_parallel": tensor_parallel, "dtype": dtype, "expert_parallel": expert_parallel}
    report: dict[str, Any] = ask_process(
        __name__, asked, part=_PART, what=f"the layout of {model}", timeout_s=_TIMEOUT_S
    )
    return report


def make_report(model: str, *, tensor_parallel: int, dtype: str, expert_parallel: bool = False) -> dict[str, Any]:
    """Make the `layout_report` in this process, which must not have built a vLLM model before."""
    config = engine_config(model, tensor_parallel=tensor_parallel, dtype=dtype, expert_parallel=expert_parallel)
    expectation = expectation_of_config(config.model_config)
    stored = checkpoint_specs(model, config.model_config.dtype)
    ranks, refusal = rank_layouts(config, stored, tied=expectation.tied), None
    not_rehearsed = _lacks_room(ranks)
    if not not_rehearsed:
        ranks, refusal = rehearsed(config, stored, ranks, tied=expectation.tied)
        if refusal:  # a tensor that no rank seems to read may matter
            ranks = rank_layouts(config, stored, tied=expectation.tied, require_all=True)
            ranks, refusal = rehearsed(config, stored, ranks, tied=expectation.tied)
    sources = ranks[0].layout.sources
    kinds = {rank.method.kind for rank in ranks}
    unused = unused_elements(sources, [Reads.of(rank.layout) for rank in ranks]) | {
        name: spec.numel
        for name, spec in sources.items()
        if spec.numel and not any(rank.needed[name] for rank in ranks)
    }
    return {
        "model": model,
        "architecture": ", ".join(config.model_config.architectures),
        "dtype": str(config.model_config.dtype).removeprefix("torch."),
        "quantization": config.model_config.quantization or "",
        "tensor_parallel": tensor_parallel,
        "expert_parallel": expert_parallel,
        "method": next(kind for kind in reversed(WriteKind) if kind in kinds),
        "refusal": refusal or "",
        "not_rehearsed": not_rehearsed,
        "tied": sorted(expectation.tied),
        "unread": [name for name in stored if name not in sources and name not in expectation.tied],
        "union": {
            "tensors": len(sources),
            "elements": sum(spec.numel for spec in sources.values()),
            "unused": unused,
        },
        "ranks": [
            {
                "rank": number,
                "method": rank.method.kind,
                "tensors": len({copy.source for copy in rank.layout.copies}),
                "copies": len(rank.layout.copies),
                "bytes": rank.layout.bytes_copied,
                "needed_elements": sum(box.numel for boxes in rank.needed.values() for box in boxes),
                "experts": rank.experts,
                "parameters": len(rank.layout.targets),
                "constants": len(rank.layout.constants),
                "constant_elements": sum(counts.constant for counts in target_coverage(rank.layout).values()),
                "reloaded": list(rank.method.reloaded_layers),
                "refused": [{"tensor": reason.tensor, "why": reason.why} for reason in rank.method.reasons],
                "learned_s": rank.learned_s,
            }
            for number, rank in enumerate(ranks)
        ],
    }


def _lacks_room(ranks: Sequence[RankLayout]) -> str:
    """The reason why memory does not suffice for a rehearsal of `ranks`; empty if it does."""
    room, needed = available_memory_bytes(), max(_MODELS * rank.nbytes for rank in ranks)
    if room is None or needed < room:
        return ""
    return f"a rehearsal takes {needed / 1e9:.1f} GB of memory, and {room / 1e9:.1f} GB are free"


if __name__ == "__main__":
    answer_asker(make_report, _PART)
