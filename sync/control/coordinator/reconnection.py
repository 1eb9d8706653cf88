"""`reconnect_lost`: connects replicas that were lost, and may have been started again, before the next version."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from weightlane.ckpt_engines import ReplicaTakenError

from .coordinator import Coordinator
from .replicas import Replica, ReplicaState

_log = logging.getLogger(__name__)


class ConnectableReplica(Replica, Protocol):
    """A running replica, which can be connected to a run by the run's address."""

    async def connect(self, rendezvous: Mapping[str, Any], backend: str, options: Mapping[str, Any]) -> None:
        """Subscribe the replica's ranks to the run at `rendezvous`, leaving an earlier run."""


async def reconnect_lost(
    coordinator: Coordinator,
    replicas: Sequence[ConnectableReplica],
    version: int,
    address: Mapping[str, Any],
    engine: tuple[str, Mapping[str, Any]],
    rejoin_s: float,
) -> None:
    """Connect the lost ones of `replicas`, each within `rejoin_s`. One that cannot be connected does not get `version`.

    Raises `ReplicaTakenError` if another publisher has taken a replica, which its owner must resolve. `version` is then aborted
    on every participant.
    """

    async def reconnect(replica: ConnectableReplica) -> ReplicaTakenError | None:
        try:
            async with asyncio.timeout(rejoin_s):
                await replica.connect(address, *engine)
        except ReplicaTakenError as error:
            return error
        except Exception as error:  # noqa: BLE001 - `connect` may be anybody's code
            _log.info("%s is still lost: %r", replica.name, error)
        return None

    states = coordinator.states()
    lost = [replica for replica in replicas if states.get(replica.name) is ReplicaState.LOST]
    for error in await asyncio.gather(*map(reconnect, lost)):
        if error is not None:
            await coordinator.abort(version, error)
            raise error
