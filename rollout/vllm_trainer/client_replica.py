"""`ClientReplica`: a vLLM behind one of vLLM's weight-sync clients, as a rollout replica.

A client has four blocking methods, see ``VLLMWeightSyncClient`` in vLLM's ``distributed/weight_transfer/base.py``. They run on
threads of their own, so a client that hangs keeps nobody past a deadline.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.error import HTTPError
from urllib.parse import urlsplit

from vllm.distributed.weight_transfer.clients import RayVLLMWeightSyncClient

from weightlane.ckpt_engines import (
    CommitError,
    ConfigError,
    Deadline,
    ProtocolError,
    WeightlaneError,
    WorkerDiedError,
)
from weightlane.sync import CommitReport, Rendezvous

from ..commit.remote_failure import RemoteFailureError, failure_from_text, quarantined, untouched
from ..commit.transfer_calls import RANKS, replica_scope
from ..contract.limits import on_thread
from ..replicas.server_calls import refusal
from ..replicas.server_replica import checked_address, with_hint

_RANKS_S = 10.0
"""Most seconds until the number of ranks is known, which a connected replica has already sent."""


class ClientReplica:
    """The vLLM that one client drives, the run's client `number`. All methods run on one event loop, one after another."""

    def __init__(self, client: Any, number: int) -> None:
        self._client = client
        self._url = str(getattr(client, "base_url", ""))
        self.name = checked_address(self._url)[1] if self._url else f"vllm-{number}"
        self.ranks = 0
        """Number of the replica's ranks; 0 before the first connection."""

    def subscriber_names(self) -> list[str]:
        """Names of the subscribers of the replica's ranks."""
        return [f"{self.name}/{rank}" for rank in range(self.ranks)]

    async def connect(self, rendezvous: Mapping[str, Any], backend: str, options: Mapping[str, Any]) -> None:
        """Subscribe every rank to the run at `rendezvous`, leaving an earlier one.

        Raises:
            WorkerDiedError: There is no vLLM.
            ConfigError: It cannot take part, runs without weightlane, or has another number of ranks than before.
            WeightlaneError: A rank could not subscribe.
        """
        info = {"rendezvous": dict(rendezvous), "replica": self.name, "backend": backend, "options": dict(options)}
        try:
            await on_thread(self._client.init_weight_transfer_engine, info)
        except Exception as cause:
            raise with_hint(self._failure(cause).error) from cause
        ranks = await on_thread(self._told_ranks, rendezvous)
        if self.ranks not in (0, ranks):
            raise ConfigError(
                f"the vLLM has {ranks} ranks, and had {self.ranks} when the run began.",
                part=self.name,
                peer=self._url,
                hint="Start it as before, or start the trainer again.",
            )
        self.ranks = ranks

    async def commit(self, version: int) -> CommitReport:
        """Put `version`, which every rank has staged, into service between two decode steps.

        Raises:
            WorkerDiedError: The vLLM does not answer.
            UntouchedError: The old version is in place on every rank and serves on.
            QuarantinedError: Any other reason. A vLLM whose weights are a mixture has paused itself.
        """
        return CommitReport(version, await self._update({"version": version}))

    async def rollback(self, version: int) -> None:
        """Serve the version before `version` again. Raises as `commit`."""
        await self._update({"rollback_of": version})

    async def quarantine(self, error: WeightlaneError) -> None:
        """Raise `CommitError`: none of the client's calls pauses a vLLM."""
        raise CommitError(
            "the client has no call that pauses its vLLM, which serves one complete version, or has paused itself.",
            part=self.name,
            peer=self._url,
        ) from error

    async def _update(self, update: Mapping[str, int]) -> float:
        """Make `update` in vLLM's three calls. Returns the seconds of the last one, which changes the weights."""
        changing = False
        try:
            await on_thread(self._client.start_weight_update)
            await on_thread(self._client.update_weights, dict(update))
            changing, began = True, time.monotonic()
            await on_thread(self._client.finish_weight_update)
            return time.monotonic() - began
        except Exception as cause:
            failure = self._failure(cause)
            if isinstance(failure.error, WorkerDiedError):
                raise failure.error from cause
            if failure.intact or not changing:
                raise untouched(failure.error, self.name) from cause
            raise quarantined(failure.error, self.name, "Its vLLM serves one complete version, or is paused") from cause

    def _told_ranks(self, rendezvous: Mapping[str, Any]) -> int:
        """The number of ranks that the connected replica has sent. Raises `ProtocolError` for any other answer."""
        deadline = Deadline.after(_RANKS_S)
        joined = Rendezvous.join(rendezvous, deadline.remaining_s)
        try:
            ranks = joined.mailbox(replica_scope(self.name)).get(RANKS, deadline)
        finally:
            joined.close()
        if not isinstance(ranks, int) or ranks < 1:
            raise ProtocolError(f"{ranks!r} is no number of ranks.", part=self.name, peer=self._url)
        return ranks

    def _failure(self, cause: Exception) -> RemoteFailureError:
        """The typed error of a failed call, and whether the old weights are certainly in place."""
        answer = getattr(cause, "response", None)  # of an HTTP client
        if answer is not None:
            call = f"POST {urlsplit(str(answer.url)).path}"
            return refusal(call, answer.status_code, answer.text, part=self.name, peer=self._url)
        ray = sys.modules.get("ray.exceptions")  # loaded where a client has Ray actors
        is_dead = ray is not None and isinstance(cause, ray.RayActorError)
        is_silent = isinstance(cause, OSError) and not isinstance(cause, HTTPError)  # that is urllib's for an answer
        if is_dead or is_silent:
            gone = WorkerDiedError(
                f"vLLM does not answer: {cause}.",
                part=self.name,
                peer=self._url,
                hint="Start it, or check the address; its log has the cause if it ended.",
            )
            return RemoteFailureError(gone, intact=False)
        return failure_from_text(str(cause), part=self.name)


def replicas_behind(client: Any) -> list[ClientReplica]:
    """One replica for each vLLM that `client` drives: a client, several of them, or vLLM's client of several Ray actors."""
    clients: list[Any] = []
    for each in client if isinstance(client, Sequence) else [client]:
        if isinstance(each, RayVLLMWeightSyncClient):
            clients += [type(each)(handle) for handle in each.handles]
        else:
            clients.append(each)
    return [ClientReplica(each, number) for number, each in enumerate(clients)]
