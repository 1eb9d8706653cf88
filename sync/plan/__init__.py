"""The transfer plan: from the slices that trainer ranks hold and that rollout ranks need to the lanes between them.

    >>> import torch
    >>> from weightlane.sync.version.box import Box
    >>> from weightlane.sync.version.placement import Placement
    >>> from weightlane.sync.version.tensor_spec import TensorSpec
    >>> from weightlane.sync.plan import HolderMap, plan_transfer
    >>> w = TensorSpec("w", (4, 2), torch.bfloat16)
    >>> halves = [Placement.of([(w, Box((row, 0), (2, 2)))]) for row in (0, 2)]
    >>> held = {"trainer-0": halves[0], "trainer-1": halves[1]}
    >>> needed = {"rollout-0/0": Placement.of([(w, Box((1, 0), (3, 2)))]), "rollout-0/1": halves[0]}
    >>> for lane in plan_transfer(HolderMap.of(held).assign(), needed).lanes:
    ...     print(lane.sender, lane.receivers, [(cell.box.starts, cell.box.shape) for cell in lane.cells])
    trainer-0 ('rollout-0/1',) [((0, 0), (1, 2))]
    trainer-0 ('rollout-0/0', 'rollout-0/1') [((1, 0), (1, 2))]
    trainer-1 ('rollout-0/0',) [((2, 0), (2, 2))]

Everything here is a pure function of plain data: no collectives, no files. Ranks only have to agree on the rank order.
"""

from .send_assignment import HolderMap
from .transfer_plan import Lane, TransferPlan, plan_transfer

__all__ = [
    "HolderMap",
    "Lane",
    "TransferPlan",
    "plan_transfer",
]
