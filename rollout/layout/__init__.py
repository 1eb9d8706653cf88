"""Layout: where each element of a checkpoint lands in a live vLLM model, and commits by copies along it.

Learning it costs milliseconds and moves no weights: the model's own ``load_weights`` is watched while it loads tensors that have
no data.

    >>> from weightlane.rollout.layout import LayoutMap, SourceSpec
    >>> import torch
    >>> SourceSpec((2, 3), torch.bfloat16).numel
    6

In a vLLM worker, inside vLLM's current config::

    layout = trace_loading(model, {"lm_head.weight": SourceSpec((300, 64), torch.bfloat16), ...})
    verdict = judge(model, layout, [layout])  # layouts of all tensor-parallel ranks
    needed_boxes(verdict.layout)  # which parts of the tensors this rank uses
    plan = CommitPlan(verdict.layout, model)
    plan.commit(tensors)  # a dense version
    plan.scatter("lm_head.weight", positions, values)  # single elements of it

`VersionLoader` does all of this for a weight-transfer engine, and falls back to vLLM's own loading where copies are not right.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from .acceptance import Verdict, Way, judge
from .map.layout_map import Constant, LayoutMap, Refusal, Slice, SourceSpec, TargetSpec
from .map.needs import needed_boxes
from .trace.trace import trace_loading
from .write.commit_plan import CommitPlan, Elements

if TYPE_CHECKING:
    from .loader import VersionLoader

__all__ = [
    "CommitPlan",
    "Constant",
    "Elements",
    "LayoutMap",
    "Refusal",
    "Slice",
    "SourceSpec",
    "TargetSpec",
    "Verdict",
    "VersionLoader",
    "Way",
    "judge",
    "needed_boxes",
    "trace_loading",
]


def __getattr__(name: str) -> Any:
    if name == "VersionLoader":  # Its module needs vLLM.
        return importlib.import_module(".loader", __name__).VersionLoader
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
