"""What every rank of a replica will ask for, found out before there is one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from weightlane.ckpt_engines import DeadlineExceededError, ProtocolError, WeightlaneError, WorkerDiedError
from weightlane.sync import Placement
from weightlane.sync.own_process import answer_asker, ask_process

from ..checkpoint_values import checkpoint_specs
from ..config import RolloutConfig
from ..expectation import expectation_of, stored_tensors
from .acceptance import Way
from .needs import needed_boxes, needed_placement
from .needs_cache import remembered
from .rank_layouts import checked_config, rank_layouts

_PART = "rollout layout"


@dataclass(frozen=True, slots=True)
class PlannedNeeds:
    """Of one replica; all replicas are alike."""

    ranks: tuple[Placement | None, ...]
    """Of each rank, what it asks for; None for whole tensors."""
    why_whole: str = ""
    """Why it asks for whole tensors, if it does."""


class _UntracedError(Exception):
    """Ranks will ask for whole tensors."""


def planned_needs(config: RolloutConfig, model_dir: Path, *, timeout_s: float = 600.0) -> PlannedNeeds:
    """Trace in a process of its own where tensors go, as workers do when they connect, without weights; see `needs_cache`.

    A worker also proves its layout with the checkpoint's values; one that could not would ask for whole tensors.

    Args:
        config: The run's rollout section.
        model_dir: Checkpoint directory.
        timeout_s: Longest time it may take.

    Raises:
        ConfigError: vLLM does not know the model, or cannot divide it so, or its weights cannot be replaced.
    """
    everything = (None,) * config.tensor_parallel
    if config.commit == "in_place":
        return PlannedNeeds(everything, "rollout.commit is in_place")
    asked = {
        "model": str(model_dir.resolve()),
        "tensor_parallel": config.tensor_parallel,
        "dtype": config.dtype,
        "expert_parallel": config.expert_parallel,
        "extra": config.extra_engine_args,
    }

    def parse(answer: Any) -> PlannedNeeds:
        if not isinstance(answer, list) or len(answer) != len(everything):
            raise ProtocolError("not what ranks need.", part=_PART)
        return PlannedNeeds(tuple(Placement.from_plain(plain) for plain in answer))

    def find() -> Any:
        answer = ask_process(__name__, asked, part=_PART, what=f"the layout of {model_dir}", timeout_s=timeout_s)
        if answer["why"]:
            raise _UntracedError(answer["why"])  # which may be otherwise the next time
        return answer["ranks"]

    try:
        return remembered(model_dir, asked, parse, find)
    except (WorkerDiedError, DeadlineExceededError) as error:
        return PlannedNeeds(everything, error.message)
    except _UntracedError as error:
        return PlannedNeeds(everything, str(error))


def find_needs(
    model: str, *, tensor_parallel: int, dtype: str, expert_parallel: bool, extra: Mapping[str, Any]
) -> dict[str, Any]:
    """`planned_needs` in this process, which must not have built a vLLM model before.

    Returns:
        ``ranks``, `Placement.to_plain` of each, or ``why`` there are none.

    Raises:
        ConfigError: As `planned_needs`.
    """
    try:
        config = checked_config(
            model, tensor_parallel=tensor_parallel, dtype=dtype, expert_parallel=expert_parallel, extra=extra
        )
        sent = checkpoint_specs(model, config.model_config.dtype)
        expectation = expectation_of(
            model,
            dtype=config.model_config.dtype,
            tied_embeddings=bool(getattr(config.model_config.hf_text_config, "tie_word_embeddings", False)),
        )
        ranks = rank_layouts(config, sent, tied=expectation.tied)
    except WeightlaneError:
        raise
    except Exception as cause:  # noqa: BLE001 - a model's loader may raise anything; workers do without copies then
        return {"ranks": [], "why": f"its loading cannot be traced: {type(cause).__name__}: {str(cause)[:200]}"}
    for rank in ranks:
        if rank.verdict.way is Way.RELOAD:
            return {"ranks": [], "why": f"versions go through vLLM's own loading: {rank.verdict.summary}"}
    converted = [name for name, (_, on_disk) in stored_tensors(model).items() if sent[name].dtype != on_disk]
    if lossy := [name for name in converted for rank in ranks if not rank.verdict.layout.holds_as_sent(name)]:
        return {"ranks": [], "why": f"{lossy[0]} is sent in another type than the model and its checkpoint have"}
    return {
        "ranks": [needed_placement(needed_boxes(rank.verdict.layout), sent).to_plain() for rank in ranks],
        "why": "",
    }


if __name__ == "__main__":
    answer_asker(find_needs, _PART)
