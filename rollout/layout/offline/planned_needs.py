"""`planned_needs`: the slices that every rank of a replica will ask for, computed before the replica exists."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from weightlane.ckpt_engines import DeadlineExceededError, ProtocolError, WeightlaneError, WorkerDiedError
from weightlane.ckpt_engines.runtime.own_process import answer_asker, ask_process
from weightlane.sync import Placement, dtype_name
from weightlane.sync.version.box import Box

from ...config import RolloutConfig
from ...contract.engine import PlannedNeeds
from ..loading.checkpoint_expectation import checkpoint_specs, expectation_of_config
from ..map.needs import needed_boxes, needed_placement
from ..write_method import WriteKind, untraceable
from .needs_cache import remembered
from .rank_layouts import rank_layouts
from .rank_models import engine_config

_PART = "rollout layout"
_TIMEOUT_S = 600.0


class _UntracedError(Exception):
    """Raised when ranks will ask for complete tensors. The arguments are the reason and the dtype that the ranks compute in."""


def planned_needs(config: RolloutConfig, model_dir: Path) -> PlannedNeeds:
    """Trace loading without weights in a separate process, as replicas do at their start, or read the `needs_cache`.

    A replica also rehearses what it traced. If copies are not right, it asks for other slices, or takes no versions.

    Raises `ConfigError` if vLLM does not know the model or cannot divide it between the ranks, or its weights cannot be replaced.
    """
    everything = (None,) * config.tensor_parallel
    reason = "rollout.commit is in_place" if config.commit == "in_place" else ""
    reason = "an adapter is small (trainer.lora.publish)" if config.adapter is not None else reason
    unsliced = PlannedNeeds(everything, config.dtype, reason)
    if reason and config.dtype != "auto" and "dtype" not in config.extra_engine_args:
        return unsliced
    asked = {
        "model": str(model_dir.resolve()),
        "tensor_parallel": config.tensor_parallel,
        "dtype": config.dtype,
        "expert_parallel": config.expert_parallel,
        "extra": config.extra_engine_args,
    }

    def parse(answer: Any) -> PlannedNeeds:
        match answer:
            case {"dtype": str() as dtype, "ranks": [*ranks]} if len(ranks) == len(everything):
                return PlannedNeeds(tuple(Placement.from_plain(plain) for plain in ranks), dtype)
        raise ProtocolError("the answer names no needs of ranks.", part=_PART)

    def find() -> Any:
        answer = ask_process(__name__, asked, part=_PART, what=f"the layout of {model_dir}", timeout_s=_TIMEOUT_S)
        if answer["why"]:
            raise _UntracedError(answer["why"], answer["dtype"])  # Not cached: the next attempt may succeed.
        return answer

    try:
        needs = remembered(model_dir, asked, parse, find)
    except (WorkerDiedError, DeadlineExceededError) as error:
        return PlannedNeeds(everything, why_whole=error.message)
    except _UntracedError as error:
        why, dtype = error.args
        return PlannedNeeds(everything, dtype, why)
    return replace(unsliced, dtype=needs.dtype) if reason else needs


def find_needs(
    model: str, *, tensor_parallel: int, dtype: str, expert_parallel: bool, extra: Mapping[str, Any]
) -> dict[str, Any]:
    """Compute `planned_needs` in this process, which must not have built a vLLM model before.

    Returns:
        ``dtype``, the dtype that ranks compute in, and ``ranks``, `Placement.to_plain` of each, or ``why`` there are none.

    Raises:
        ConfigError: As `planned_needs`.
    """
    dtype_found, why, needed = "", "", []
    try:
        config = engine_config(
            model, tensor_parallel=tensor_parallel, dtype=dtype, expert_parallel=expert_parallel, extra=extra
        )
        dtype_found = dtype_name(config.model_config.dtype)
        sent = checkpoint_specs(model, config.model_config.dtype)
        ranks = rank_layouts(config, sent, tied=expectation_of_config(config.model_config).tied)
        reloads = [rank.method.summary for rank in ranks if rank.method.kind is WriteKind.RELOAD]
        if reloads:
            why = f"versions go through vLLM's own loading: {reloads[0]}"
        else:
            unread: dict[str, list[Box]] = {name: [] for name in sent if name not in ranks[0].layout.sources}
            needed = [needed_placement(needed_boxes(rank.method.layout) | unread, sent).to_plain() for rank in ranks]
    except WeightlaneError:
        raise
    except Exception as cause:  # noqa: BLE001 - a model's loader may raise anything; replicas then load versions without copies
        why = untraceable(cause).why
    return {"dtype": dtype_found, "ranks": needed, "why": why}


if __name__ == "__main__":
    answer_asker(find_needs, _PART)
