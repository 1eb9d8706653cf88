"""How long a version should take over given links: what a plan is judged by before there are any.

The model: a sender begins its lanes in their order, one after the other, each pipelined in buckets with two in flight. A lane
goes as fast as its slowest hop lets it. Lanes that meet at a network card share it fairly (max-min fairness: Bertsekas and
Gallager, "Data Networks", 6.5.2), and a card sends and receives at the same time. Packing, staging and commits are not in it,
nor is what switches between the cards do.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ...config import Network
from ..routes import Route
from ..transfer_plan import TransferPlan
from .traffic import Traffic, traffic

_STEPS = 400
_IN_FLIGHT = 2
_ROUNDING = 1e-9
Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Prediction:
    """Seconds that a version takes."""

    seconds: float
    bound_s: float
    """What the busiest network card needs for its bytes: no schedule of these routes is faster."""
    busiest: str
    """Whose card that is."""
    sends: bool
    """Whether it is busy with sending; else with receiving."""


@dataclass(frozen=True, slots=True)
class GatherAndBroadcast:
    """Seconds for the same version through one trainer rank, which gathers buckets and sends the one before meanwhile."""

    gather_s: float
    streams_s: float
    """All of it, when every replica gets a stream of its own, and its ranks hand it on to one another."""
    tree_s: float
    """All of it, when every rank hands it on to the next, or to two others: whichever is faster."""


def predict(plan: TransferPlan, routes: Sequence[Route], network: Network) -> Prediction:
    """How long a plan takes by the given routes."""
    moved = traffic(plan, routes)
    bound_s, busiest, sends = _bound(plan, moved, network)
    # Steps are not exact: what one leaves over is spent at the speed of the next.
    seconds = max(_Simulation(plan, routes, network).run(bound_s), bound_s)
    return Prediction(seconds, bound_s, busiest, sends)


def gather_and_broadcast(
    payload_bytes: int, own_bytes: int, replicas: int, ranks: int, network: Network
) -> GatherAndBroadcast:
    """How long one sender takes for all, for comparison; its ranks' cards are as fast as those of `predict`.

    Args:
        payload_bytes: All tensors, once.
        own_bytes: What the gathering rank has itself.
        replicas: How many replicas take all of it.
        ranks: How many rollout ranks these have together, each of which gets all of it.
        network: What links carry.
    """
    gather_s = (payload_bytes - own_bytes) / network.sender_bytes_per_s
    fill_s = network.fill_s(payload_bytes)
    receive_s = payload_bytes / network.receiver_bytes_per_s
    streams_s = (
        max(replicas * payload_bytes / network.sender_bytes_per_s, receive_s) + ranks / max(replicas, 1) * fill_s
    )
    once_s = max(payload_bytes / network.sender_bytes_per_s, receive_s)
    tree_s = min(once_s + ranks * fill_s, 2 * once_s + 2 * np.ceil(np.log2(ranks + 1)) * fill_s)
    return GatherAndBroadcast(gather_s, max(gather_s, streams_s) + fill_s, float(max(gather_s, tree_s) + fill_s))


def _bound(plan: TransferPlan, moved: Traffic, network: Network) -> tuple[float, str, bool]:
    trainers = {lane.sender for lane in plan.lanes}
    found = (0.0, "", True)
    for name, nbytes in moved.sent.items():
        speed = network.sender_bytes_per_s if name in trainers else network.receiver_bytes_per_s
        found = max(found, (nbytes / speed, name, True), key=lambda card: card[0])
    for name, nbytes in moved.received.items():
        found = max(found, (nbytes / network.receiver_bytes_per_s, name, False), key=lambda card: card[0])
    return found


class _Simulation:
    """Lanes in flight, in steps of time during which their speeds do not change."""

    def __init__(self, plan: TransferPlan, routes: Sequence[Route], network: Network) -> None:
        cards: dict[tuple[str, bool], int] = {}
        speeds: list[float] = []
        trainers = {lane.sender for lane in plan.lanes}

        def card(name: str, sends: bool) -> int:
            if (name, sends) not in cards:
                cards[name, sends] = len(cards)
                speeds.append(network.sender_bytes_per_s if name in trainers else network.receiver_bytes_per_s)
            return cards[name, sends]

        self._used: list[tuple[Ints, Floats]] = []
        """Of each lane, the cards that it uses and how often its bytes pass each."""
        tail_s = []
        for route, nbytes in zip(routes, plan.lane_bytes, strict=True):
            often: dict[int, int] = {}
            for sender, receiver in route.hops:
                for place in (card(sender, True), card(receiver, False)):
                    often[place] = often.get(place, 0) + 1
            tail_s.append((route.depth - 1) * max(often.values()) * network.fill_s(nbytes))
            self._used.append((np.fromiter(often, np.int64), np.fromiter(often.values(), np.float64)))
        self._speeds = np.array(speeds)
        self._left = np.array(plan.lane_bytes, np.float64)
        self._tail_s = np.array(tail_s)
        self._latency_s = network.latency_s
        slowest = min(network.sender_bytes_per_s, network.receiver_bytes_per_s)
        self._most = _IN_FLIGHT * network.bucket_bytes / (network.bucket_bytes / slowest + network.latency_s)
        self._queues: dict[str, list[int]] = {}
        for number, lane in enumerate(plan.lanes):
            self._queues.setdefault(lane.sender, []).append(number)

    def run(self, bound_s: float) -> float:
        """Seconds until the last receiver has everything; `bound_s` sets how fine the steps are."""
        now_s, end_s = 0.0, 0.0
        queues = [queue[::-1] for queue in self._queues.values()]
        wait_s = np.full(len(queues), self._latency_s)
        while queues:
            lanes = np.array([queue[-1] for queue in queues])
            speeds = self._shared(lanes)
            finish_s = wait_s + self._left[lanes] / speeds
            step_s = max(float(finish_s.min()), bound_s / _STEPS)
            keep = []
            for index, (queue, lane) in enumerate(zip(queues, lanes, strict=True)):
                if finish_s[index] > step_s:
                    self._left[lane] -= max(step_s - wait_s[index], 0.0) * speeds[index]
                    wait_s[index] = max(wait_s[index] - step_s, 0.0)
                else:
                    # What is left of the step goes to the next lane: as a wait that is negative.
                    end_s = max(end_s, now_s + float(finish_s[index]) + float(self._tail_s[lane]))
                    wait_s[index] = self._latency_s - (step_s - finish_s[index])
                    queue.pop()
                if queue:
                    keep.append(index)
            queues = [queues[index] for index in keep]
            wait_s = wait_s[keep]
            now_s += step_s
        return end_s

    def _shared(self, lanes: Ints) -> Floats:
        """How fast each of these lanes goes, bytes per second, when they share cards fairly."""
        used = [self._used[lane] for lane in lanes]
        first = np.cumsum([0, *(len(cards) for cards, _ in used)])[:-1]
        cards = np.concatenate([cards for cards, _ in used])
        often = np.concatenate([times for _, times in used])
        whose = np.repeat(np.arange(len(lanes)), [len(cards) for cards, _ in used])
        room, speeds = self._speeds.copy(), np.zeros(len(lanes))
        going = np.ones(len(lanes), bool)
        while going.any():
            weights = np.bincount(cards, often * going[whose], len(room))
            fair = np.divide(room, weights, out=np.full(len(room), np.inf), where=weights > 0)
            offered = np.minimum(np.minimum.reduceat(fair[cards], first), self._most)
            # A card is a bottleneck when no lane through it is held up more elsewhere; the lanes through it are settled.
            held_up = np.bincount(cards, (offered[whose] < fair[cards] * (1 - _ROUNDING)) & going[whose], len(room)) > 0
            settled = going & (np.logical_or.reduceat(~held_up[cards], first) | (offered >= self._most))
            speeds[settled] = offered[settled]
            # Rounding must not leave a lane without any speed.
            room = np.maximum(room - np.bincount(cards, often * (speeds * settled)[whose], len(room)), 1.0)
            going &= ~settled
        return speeds
