"""`ReferenceRefresh`: makes the reference what the policy has become, every few batches."""

from __future__ import annotations

import asyncio
import shutil
from dataclasses import dataclass
from pathlib import Path

from ..data.step_result import StepResult
from ..dispatch.role import Role
from .roles import REFERENCE


@dataclass(frozen=True, slots=True)
class ReferenceRefresh:
    """The refreshing of a reference. The weights pass through files, so that both roles may be on any ranks.

    Args:
        every: Optimizer steps of the policy from one refresh to the next.
        directory: Where the policy is exported meanwhile; on a file system that all ranks share.
    """

    every: int
    directory: Path

    def is_due(self, result: StepResult, updates: int) -> bool:
        """Whether a multiple of `every` lies among the optimizer steps of `result`, which has tried `updates` on a batch."""
        taken = 0 if result.skipped else updates - int(result.metrics.get("skipped_updates", 0))
        return result.step // self.every > (result.step - taken) // self.every

    async def refresh(self, policy: Role, reference: Role) -> None:
        """Load the policy's weights, an adapter of it added, into the reference."""
        await asyncio.to_thread(shutil.rmtree, self.directory, ignore_errors=True)  # left by a run that died
        try:
            await policy.export_hf(self.directory, "float32")
            await reference.load(self.directory, optimizer=False)
        finally:
            await asyncio.to_thread(shutil.rmtree, self.directory, ignore_errors=True)


def reference_state(policy_state: Path) -> Path:
    """The directory of a refreshed reference's state, next to the policy's."""
    return policy_state.with_name(REFERENCE)
