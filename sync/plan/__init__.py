"""Who sends which slices to whom: from what trainer ranks hold and rollout ranks need, to streams between them.

    >>> import torch
    >>> from weightlane.sync.version.box import Box
    >>> from weightlane.sync.version.placement import Placement
    >>> from weightlane.sync.version.tensor_spec import TensorSpec
    >>> from weightlane.sync.plan import plan_transfer, shares
    >>> w = TensorSpec("w", (4, 2), torch.bfloat16)
    >>> halves = [Placement.of([(w, Box((row, 0), (2, 2)))]) for row in (0, 2)]
    >>> held = {"trainer-0": halves[0], "trainer-1": halves[1]}
    >>> needed = {"rollout-0/0": Placement.of([(w, Box((1, 0), (3, 2)))]), "rollout-0/1": halves[0]}
    >>> for lane in plan_transfer(shares(held), needed, cut="exact").lanes:
    ...     print(lane.sender, lane.receivers, [(cell.box.starts, cell.box.shape) for cell in lane.cells])
    trainer-0 ('rollout-0/0', 'rollout-0/1') [((1, 0), (1, 2))]
    trainer-0 ('rollout-0/1',) [((0, 0), (1, 2))]
    trainer-1 ('rollout-0/0',) [((2, 0), (2, 2))]

Everything here is a pure function of plain data: no collectives, no files. What ranks agree on is the order of ranks.
"""

from ..config import BYTES_PER_GBIT, Network
from .prediction.gathered import gathered_report
from .prediction.plan_report import explain, plan_report
from .prediction.predict import GatherAndBroadcast, Prediction, gather_and_broadcast, predict
from .prediction.traffic import Traffic, traffic
from .receiver_groups import replica_of
from .routes import Route, plan_routes, straight
from .send_assignment import Holdings, Replicated, shares
from .transfer_plan import Cell, Lane, TransferPlan, plan_transfer

__all__ = [
    "BYTES_PER_GBIT",
    "Cell",
    "GatherAndBroadcast",
    "Holdings",
    "Lane",
    "Network",
    "Prediction",
    "Replicated",
    "Route",
    "Traffic",
    "TransferPlan",
    "explain",
    "gather_and_broadcast",
    "gathered_report",
    "plan_report",
    "plan_routes",
    "plan_transfer",
    "predict",
    "replica_of",
    "shares",
    "straight",
    "traffic",
]
