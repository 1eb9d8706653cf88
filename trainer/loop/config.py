"""Settings of the fully-async loop itself."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from ..config import Section


class LoopConfig(Section):
    """Length, staleness and bookkeeping of a run."""

    steps: int = Field(100, ge=1, description="Optimizer steps of the whole run, resumed parts included.")
    max_staleness: int = Field(
        1, ge=0, description="Most versions a trained token may lag behind the parameters it trains; 0 is on-policy."
    )
    late_groups: Literal["wait", "train", "mask", "drop"] = Field(
        "wait",
        description="What becomes of a group that is not complete when it is its turn. wait: the trainer waits for it, so that"
        " groups are trained in the order in which they were begun, none beyond max_staleness, and long completions as often as"
        " they are drawn. The others let later groups go first; train: it is trained when it comes, however stale. mask: its"
        " tokens beyond max_staleness are left out of the loss. drop: it is dropped if it has one, which trains brevity: the"
        " bias is printed at the end.",
    )
    max_failed_share: float = Field(
        0.1,
        ge=0,
        le=1,
        description="Share of the samples of the last 20 groups (100 samples at least), or of the last 20 optimizer steps, that"
        " may fail (a reward that raises, a request beyond its time limit, a gradient that is not finite) before the run ends;"
        " each costs its sample or step only.",
    )
    save_every: int = Field(
        50, ge=0, description="Save the full training state every so many steps, and at the end; 0 only at the end."
    )
    export_every: int = Field(
        0,
        ge=0,
        description="Write a Hugging Face directory, exports/step-N, every so many steps; model, at the end, is always written.",
    )
    evaluate_tasks: int = Field(
        512,
        ge=0,
        description="Held-out tasks, of each set, whose mean greedy reward is measured before and after; 0 none.",
    )
    evaluate_samples: int = Field(
        0,
        ge=0,
        description="Completions sampled for each of these tasks as well, with algorithm.temperature, from which pass@1, pass@2,"
        " pass@4 and so on up to this number are estimated; 0 none.",
    )
    pass_reward: float = Field(1.0, description="A sampled completion passes if its reward is this or more.")
    evaluate_every: int = Field(
        0,
        ge=0,
        description="Measure it every so many steps, too, beside the training and with whatever version serves; 0 not.",
    )
    samples_per_step: int = Field(
        2, ge=0, description="Completions of each step that are written to samples.jsonl with their rewards."
    )
    max_failed_syncs: int = Field(
        3, ge=0, description="Consecutive aborted versions after which the run ends; the old version serves meanwhile."
    )
    blocking_syncs: int = Field(
        0,
        ge=0,
        description=(
            "Versions, spread over the run, that are synchronous updates: the trainer waits until they serve. For comparison."
        ),
    )
