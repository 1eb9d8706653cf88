"""What a user can set about the fully-async loop itself."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field


class LoopConfig(BaseModel):
    """Length, staleness and bookkeeping of a run."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    steps: int = Field(100, ge=1, description="Optimizer steps of the whole run, resumed parts included.")
    max_staleness: int = Field(
        1, ge=0, description="Most versions a trained token may lag behind the parameters it trains; 0 is on-policy."
    )
    save_every: int = Field(
        50, ge=0, description="Save the full training state every so many steps, and at the end; 0 only at the end."
    )
    evaluate_tasks: int = Field(
        512, ge=0, description="Held-out tasks whose greedy exact-match accuracy is measured before and after; 0 none."
    )
    max_failed_syncs: int = Field(
        3, ge=0, description="Consecutive aborted versions after which the run ends; the old version serves meanwhile."
    )
    blocking_syncs: int = Field(
        3,
        ge=0,
        description="First versions for which the trainer waits: the blocking way, timed for comparison; 0 none.",
    )
