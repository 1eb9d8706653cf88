"""What ``weightlane layout`` shows: where a model's tensors go on each rank, and what does not go by copies."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from weightlane.ckpt_engines import ConfigError
from weightlane.ckpt_engines.runtime.available_memory import available_memory_bytes
from weightlane.ckpt_engines.runtime.own_process import answer_asker, ask_process
from weightlane.sync import Expectation

from ..acceptance import Way
from ..loading.expectation import expectation_of
from ..map.coverage import target_coverage, unused_elements
from ..map.layout_map import SourceSpec
from .rank_layouts import RankLayout, checked_config, rank_layouts, rehearsed

_PART = "layout"
_MODELS = 3
"""What a rehearsal may take at once, in sizes of a rank's model: one that is built, one that is loaded, and what vLLM repacks."""
_DTYPES = ("auto", "float32", "bfloat16", "float16")


def layout_report(
    model: str,
    *,
    tensor_parallel: int,
    dtype: str = "auto",
    expert_parallel: bool = False,
    timeout_s: float = 600.0,
) -> dict[str, Any]:
    """Find out in a process of its own where the tensors of `model` go; needs vLLM and no GPU.

    The verdict is that of a worker: what is traced is rehearsed beside ordinary loads where two models of a rank fit into the
    memory that is free. Where they do not, nothing is loaded, and ``not_rehearsed`` says so.

    Args:
        model: Checkpoint directory, or the name of a model whose files are on this machine.
        tensor_parallel: Ranks of a replica.
        dtype: Data type the replica computes in, and in which tensors are sent; ``auto`` takes the checkpoint's.
        expert_parallel: Whether experts are divided between the ranks by number.
        timeout_s: Longest time it may take.

    Returns:
        Plain data: ``model``, ``architecture``, ``dtype``, ``quantization`` (vLLM's name for it, or nothing),
        ``tensor_parallel``, ``expert_parallel``, ``way``, ``refusal`` (why a worker takes no versions of this model, or
        nothing), ``not_rehearsed`` (why, or nothing), ``tied``, ``union`` (over ranks: ``tensors``, ``elements``,
        ``unused``) and ``ranks``, each with ``rank``, ``way``, ``tensors``, ``slices``, ``bytes``, ``needed_elements`` (of the
        checkpoint), ``experts`` (for each kind of layer that has any: ``held``, their numbers, and ``of``, how many there
        are), ``constants``, ``constant_elements``, ``parameters``, ``reloaded`` (layers), ``refused`` and ``learned_s``.

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
    report: dict[str, Any] = ask_process(
        __name__, asked, part=_PART, what=f"the layout of {model}", timeout_s=timeout_s
    )
    return report


def make_report(model: str, *, tensor_parallel: int, dtype: str, expert_parallel: bool = False) -> dict[str, Any]:
    """`layout_report` in this process, which must not have built a vLLM model before."""
    config = checked_config(model, tensor_parallel=tensor_parallel, dtype=dtype, expert_parallel=expert_parallel)
    expectation = expectation_of(
        model,
        dtype=config.model_config.dtype,
        tied_embeddings=bool(getattr(config.model_config.hf_text_config, "tie_word_embeddings", False)),
    )
    sources = sent_tensors(expectation, config.model_config.dtype)
    ranks, refusal = rank_layouts(config, sources, tied=expectation.tied), None
    not_rehearsed = _lacks_room(ranks)
    if not not_rehearsed:
        ranks, refusal = rehearsed(config, sources, ranks)
    layouts = [rank.layout for rank in ranks]
    ways = {rank.verdict.way for rank in ranks}
    excused = {source for layout in layouts for source, _ in layout.feeds}
    excused |= {refusal.tensor for layout in layouts for refusal in layout.refused_sources}
    unused = {name: count for name, count in unused_elements(layouts).items() if name not in excused}
    unused |= {
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
        "way": next(way for way in (Way.RELOAD, Way.MIXED, Way.TRACED) if way in ways),
        "refusal": refusal or "",
        "not_rehearsed": not_rehearsed,
        "tied": sorted(expectation.tied),
        "union": {
            "tensors": len(sources),
            "elements": sum(spec.numel for spec in sources.values()),
            "unused": unused,
        },
        "ranks": [
            {
                "rank": number,
                "way": rank.verdict.way,
                "tensors": len({piece.source for piece in rank.layout.slices}),
                "slices": len(rank.layout.slices),
                "bytes": rank.layout.bytes_copied,
                "needed_elements": sum(box.numel for boxes in rank.needed.values() for box in boxes),
                "experts": rank.experts,
                "parameters": len(rank.layout.targets),
                "constants": len(rank.layout.constants),
                "constant_elements": sum(counts.constant for counts in target_coverage(rank.layout).values()),
                "reloaded": list(rank.verdict.modules),
                "refused": [{"tensor": reason.tensor, "why": reason.why} for reason in rank.verdict.reasons],
                "learned_s": rank.learned_s,
            }
            for number, rank in enumerate(ranks)
        ],
    }


def _lacks_room(ranks: Sequence[RankLayout]) -> str:
    """Why two models of a rank may not be loaded here, beside the memory of one that is built; nothing where they may."""
    room, needed = available_memory_bytes(), max(_MODELS * rank.nbytes for rank in ranks)
    if room is None or needed < room:
        return ""
    return f"it takes {needed / 1e9:.1f} GB of memory, and {room / 1e9:.1f} GB are free"


def sent_tensors(expectation: Expectation, dtype: Any) -> dict[str, SourceSpec]:
    """What a version is made of that is sent in `dtype` where that may be, aliases left out."""
    return {
        name: SourceSpec(expected.shape, dtype if dtype in expected.dtypes else next(iter(expected.dtypes)))
        for name, expected in expectation.tensors.items()
        if name not in expectation.tied
    }


if __name__ == "__main__":
    answer_asker(make_report, _PART)
