"""`ServerReplica`: an unpatched vLLM OpenAI server as a rollout replica, driven over the server's own HTTP endpoints.

The server is started as vLLM's documentation says, with weightlane installed in the same environment::

    VLLM_SERVER_DEV_MODE=1 python -m vllm.entrypoints.openai.api_server --model MODEL \
        --host 127.0.0.1 --port 8000 --weight-transfer-config '{"backend": "weightlane"}'

Only control calls go over HTTP (vLLM's ``entrypoints/rl/online/api_router.py``); the weights go through the checkpoint engine.
The client needs neither vLLM nor Ray.
"""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

from weightlane.ckpt_engines import (
    CommitError,
    ConfigError,
    Deadline,
    QuarantinedError,
    WeightlaneError,
    WorkerDiedError,
)
from weightlane.sync import CommitMode, CommitReport

from ..commit.remote_failure import RemoteFailureError, quarantined, untouched
from ..commit.transfer_calls import ENGINE_SHARE, EngineCommit
from .server_calls import ServerCalls

_log = logging.getLogger(__name__)
_CLEAN_UP_S = 10.0
"""Most seconds that pausing a server after a failure may take, beyond the deadline of the call that failed."""


class ServerReplica:
    """One server. All methods run on one event loop; commits and connections take turns.

    Args:
        url: Address of the server, e.g. ``http://127.0.0.1:8000``.
        tensor_parallel: The server's number of ranks, ``--tensor-parallel-size``.
        name: The replica's name, unique within a run; by default made of host and port.
        token: Bearer token of every call. vLLM's own ``--api-key`` does not guard these endpoints, but a proxy may.
        connect_timeout_s: Most seconds `connect` may take.
        commit_timeout_s: Most seconds a commit may take; a slower server is quarantined until the next commit.
        staging_limit_bytes: Most memory a rank may use to stage a version; None leaves it at the server's default.
        take_over: Whether the first connection takes the server from another publisher that lives, which gets a
            `ReplicaTakenError` then. Without it, this one does.
        commit: ``"in_place"`` writes full versions into the weights as they are received, while the server is paused; see
            `RolloutConfig.commit`. `commit_timeout_s` must then allow for the transfer.

    Raises:
        ConfigError: `url` is not the address of a server.
    """

    def __init__(
        self,
        url: str,
        *,
        tensor_parallel: int = 1,
        name: str = "",
        token: str = "",
        connect_timeout_s: float = 60.0,
        commit_timeout_s: float = 60.0,
        staging_limit_bytes: int | None = None,
        commit: CommitMode = "staged",
        take_over: bool = False,
    ) -> None:
        self.url, default_name = checked_address(url)
        self.name = name or default_name
        self.version: int | None = None
        """The version that this object has put into service; None before the first one."""
        self._before: int | None = None
        self._ranks = tensor_parallel
        self._token = token
        self._connect_timeout_s = connect_timeout_s
        self._commit_timeout_s = commit_timeout_s
        self._staging: dict[str, Any] = {"commit": commit}
        if staging_limit_bytes is not None:
            self._staging["staging_limit_bytes"] = staging_limit_bytes
        self.serving = True
        """False after a commit that left untrusted weights, until a version has been committed."""
        self._quarantining = 0
        """Number of `quarantine` calls that have not ended. One that waits for a commit outlives it."""
        self._take_over = take_over
        self._control = asyncio.Lock()

    def subscriber_names(self) -> list[str]:
        """The names under which the server's ranks subscribe."""
        return [f"{self.name}/{rank}" for rank in range(self._ranks)]

    async def connect(
        self, rendezvous: Mapping[str, Any], backend: str, options: Mapping[str, Any] | None = None
    ) -> None:
        """Subscribe every rank to the publisher at `rendezvous`, and leave the publisher before.

        The address contains the run's secret and is sent unencrypted: use the loopback interface, a private network or https.
        A server that is paused because a commit failed stays paused until the next version commits.

        Raises:
            WorkerDiedError: Nothing answers at the address.
            ReplicaTakenError: The server follows another publisher that lives, and keeps following it.
            ConfigError: The endpoints are off, the token is wrong, the number of ranks differs, or a rank refuses the request.
            WeightlaneError: Another error of a rank; no rank is subscribed then.
        """
        info = {
            "rendezvous": dict(rendezvous),
            "replica": self.name,
            "backend": backend,
            "options": dict(options or {}),
            "take_over": self._take_over,
        }
        deadline = Deadline.after(self._connect_timeout_s)
        async with self._control, self._calls() as server:
            try:
                ranks = (await server.get("get_world_size", deadline.remaining_s, include_dp="false")).get("world_size")
                engines = (await server.get("get_world_size", deadline.remaining_s)).get("world_size")
                if ranks and engines != ranks:
                    raise ConfigError(
                        f"the server is data-parallel: it has {engines} ranks in engines of {ranks}.",
                        part=self.name,
                        peer=self.url,
                        hint="Start a server for each engine, without --data-parallel-size, and publish to all of them.",
                    )
                if ranks != self._ranks:
                    raise ConfigError(
                        f"the server has {ranks} ranks, and tensor_parallel says {self._ranks}.",
                        part=self.name,
                        peer=self.url,
                        hint="Give tensor_parallel the server's --tensor-parallel-size; other parallelism is not supported.",
                    )
                body = {"init_info": info | self._staging}
                await server.post("init_weight_transfer_engine", body, deadline.remaining_s)
                self._take_over = False  # two that take the server from each other would both believe that they have it
            except RemoteFailureError as failure:
                if isinstance(failure.error, QuarantinedError):
                    self.serving = False
                    await _stop(server)
                raise with_hint(failure.error) from failure

    async def commit(self, version: int) -> CommitReport:
        """Put `version`, which every rank has staged, into service between two decode steps.

        Requests in flight recompute their caches and continue under the new weights.

        Raises:
            WorkerDiedError: The server does not answer.
            QuarantinedError: The weights cannot be trusted: requests in flight are ended, the server stays paused until a
                version has been committed, and `serving` is False.
            UntouchedError: Any other reason: the old version is in place on every rank and serves on.
        """
        async with self._control:
            before = self.version if self.serving else None
            report = await self._update({"version": version}, version)
            self._before, self.version = before, version
            return report

    async def rollback(self, version: int) -> None:
        """Serve the version before `version` again, on every rank from the same step on. Does nothing if it serves already.

        Raises:
            CommitError: The version before is no longer available; `version` serves on.
            WeightlaneError: As `commit`.
        """
        async with self._control:
            if self.serving and (self.version is None or self.version < version):
                return
            if self.version != version or self._before is None:
                raise CommitError(f"version {version} cannot be rolled back.", part=self.name, peer=self.url)
            await self._update({"rollback_of": version}, self._before)
            self.version, self._before = self._before, None

    async def quarantine(self, error: WeightlaneError) -> None:
        """End requests in flight, and let new ones wait until a version has been committed.

        From vLLM 0.33 on, new ones are answered with status 503, and are to be sent again.

        Raises:
            WeightlaneError: The server could not be paused.
        """
        _log.warning("%s is paused until a version commits: %s", self.name, error)
        self.serving = False
        self._quarantining += 1
        try:
            async with self._control, self._calls() as server:
                if failure := await _stop(server):
                    raise failure.error from failure
        finally:
            self._quarantining -= 1

    def _calls(self) -> ServerCalls:
        return ServerCalls(self.url, self._token, self.name, "a vLLM server")

    async def _update(self, update: Mapping[str, int], serves: int) -> CommitReport:
        """Make `update` in one call, with `_control` held. The server names its weights version `serves` from then on."""
        options = EngineCommit(
            weight_version=str(serves), within_s=ENGINE_SHARE * self._commit_timeout_s, trusted=self.serving
        )
        async with self._calls() as server:
            began = time.monotonic()
            try:
                info = {**update, "engine_commit": options.model_dump()}
                await server.post("update_weights", {"update_info": info}, self._commit_timeout_s)
            except asyncio.CancelledError:
                self.serving = False
                await _stop(server)
                raise
            except RemoteFailureError as failure:
                if self.serving and failure.intact:
                    raise untouched(failure.error, self.name) from failure
                self.serving = False
                silent = await _stop(server)
                if isinstance(failure.error, WorkerDiedError) and silent:
                    raise failure.error from failure
                raise quarantined(failure.error, self.name, "The server stays paused") from failure
            self.serving = not self._quarantining
            return CommitReport(serves, time.monotonic() - began)


async def _stop(server: ServerCalls) -> RemoteFailureError | None:
    """Pause a server with untrusted weights, and end its requests. Returns the failure of this call, if it fails.

    vLLM runs calls in order, so that this call waits for a load that has outlived its deadline.
    """
    try:
        await server.post("pause", {}, _CLEAN_UP_S, mode="abort", clear_cache="true")
    except RemoteFailureError as failure:
        return failure
    return None


def with_hint(error: WeightlaneError) -> WeightlaneError:
    """`error`, or a `ConfigError` with a hint if vLLM runs without weightlane's engine, or with another one."""
    said = error.message.lower()
    if "weight transfer not configured" in said or "invalid init_info for" in said:
        which = "with another" if "invalid" in said else "without a"
        return ConfigError(
            f"the server was started {which} weight-transfer engine.",
            part=error.part,
            peer=error.peer,
            hint="""Start it with --weight-transfer-config '{"backend": "weightlane"}'.""",
        )
    return error


def checked_address(url: str) -> tuple[str, str]:
    """`url` without a trailing slash, and a replica name made of its host and port."""
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
    except ValueError:
        host, port = None, None
    if host is None or parts.scheme not in ("http", "https") or parts.query or parts.fragment or parts.username:
        raise ConfigError(
            f"{url!r} is not the address of a server.", part="server replica", hint="For example http://127.0.0.1:8000."
        )
    return url.rstrip("/"), re.sub(r"[^A-Za-z0-9.]+", "-", f"{host}-{port or parts.scheme}").strip("-")
