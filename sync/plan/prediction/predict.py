"""The predicted time of a version over given network cards.

The model: a sender sends its lanes one after the other, each in buckets with two in flight. A lane is as fast as its slowest hop.
Lanes at one network card share it fairly (max-min fairness: Bertsekas and Gallager, "Data Networks", 6.5.2). A card sends and
receives at the same time. Packing, staging, commits, and switches between the cards are not modelled.
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
"""Shortest step of a simulation, as a fraction of the predicted time's lower bound; it limits the number of steps."""
_IN_FLIGHT = 2
"""Buckets of a lane on the wire, as the pipeline has them."""
_ROUNDING = 1e-9
"""Relative difference of two speeds that is taken for rounding."""
Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Prediction:
    """The predicted time of a version."""

    seconds: float
    bound_s: float
    """Seconds that the busiest network card needs for its bytes: no schedule of these routes is faster."""
    busiest: str
    """The rank with this card."""
    sends: bool
    """Whether the card is busy with sending; otherwise with receiving."""


@dataclass(frozen=True, slots=True)
class GatherAndBroadcast:
    """The predicted time of the same version through one trainer rank, which sends one bucket while it gathers the next."""

    gather_s: float
    """Seconds to gather the version."""
    streams_s: float
    """Seconds in all when every replica gets a stream of its own, which its ranks relay to one another."""
    tree_s: float
    """Seconds in all when every rank relays to the next, or to two others, whichever is faster."""


def predict(plan: TransferPlan, routes: Sequence[Route], network: Network) -> Prediction:
    """Predict the time of a plan whose lanes take these routes."""
    moved = traffic(plan, routes)
    bound_s, busiest, sends = _bound(plan, moved, network)
    # Steps are not exact: the rest of one is spent at the speed of the next.
    seconds = max(_Simulation(plan, routes, network).run(bound_s), bound_s)
    return Prediction(seconds, bound_s, busiest, sends)


def gather_and_broadcast(
    payload_bytes: int, own_bytes: int, replicas: int, ranks: int, network: Network
) -> GatherAndBroadcast:
    """Predict the time with one sender for all, as a comparison for `predict`.

    Args:
        payload_bytes: Bytes of all tensors.
        own_bytes: Bytes that the gathering rank has itself.
        replicas: Number of replicas.
        ranks: Number of rollout ranks of all replicas; each receives everything.
        network: Speeds of the network cards.
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
    """Simulates the lanes in steps of time during which their speeds do not change."""

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
        """For each lane the cards that it uses, and how often its bytes pass each."""
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
        """Seconds until the last receiver has everything. Steps are a fraction of `bound_s`."""
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
                    # The rest of the step goes to the next lane, as a negative wait.
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
        """Speed of each of these lanes in bytes per second when they share cards fairly."""
        used = [self._used[lane] for lane in lanes]
        first = np.cumsum([0, *(len(cards) for cards, _ in used)])[:-1]
        cards = np.concatenate([cards for cards, _ in used])
        often = np.concatenate([times for _, times in used])
        whose = np.repeat(np.arange(len(lanes)), [len(cards) for cards, _ in used])
        room, speeds = self._speeds.copy(), np.zeros(len(lanes))
        unknown = np.ones(len(lanes), bool)
        while unknown.any():
            weights = np.bincount(cards, often * unknown[whose], len(room))
            fair = np.divide(room, weights, out=np.full(len(room), np.inf), where=weights > 0)
            offered = np.minimum(np.minimum.reduceat(fair[cards], first), self._most)
            # A card is a bottleneck when no lane through it is slower elsewhere. That gives the speed of all lanes through it.
            slower = (offered[whose] < fair[cards] * (1 - _ROUNDING)) & unknown[whose]
            free = np.bincount(cards, slower, len(room)) > 0
            found = unknown & (np.logical_or.reduceat(~free[cards], first) | (offered >= self._most))
            speeds[found] = offered[found]
            # Rounding must not leave a lane without any speed.
            room = np.maximum(room - np.bincount(cards, often * (speeds * found)[whose], len(room)), 1.0)
            unknown &= ~found
        return speeds
