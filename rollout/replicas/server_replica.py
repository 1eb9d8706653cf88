"""`ServerReplica`: a vLLM OpenAI server that nobody patched, as a rollout replica, driven over its own HTTP endpoints.

The server is started as vLLM's documentation says, with weightlane installed beside it::

    VLLM_SERVER_DEV_MODE=1 python -m vllm.entrypoints.openai.api_server --model MODEL \
        --host 127.0.0.1 --port 8000 --weight-transfer-config '{"backend": "weightlane"}'

Only control goes over HTTP (vLLM's ``entrypoints/rl/online/api_router.py``); the weights go through the checkpoint engine.
Neither vLLM nor Ray is needed on this side.
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

from ..commit.commit import ENGINE_SHARE, untouched
from ..commit.transfer_calls import WholeCommit
from .server_calls import CallFailedError, ServerCalls

_log = logging.getLogger(__name__)
_CLEAN_UP_S = 10.0


class ServerReplica:
    """One server. All methods run on one event loop; commits and connections take turns.

    Args:
        url: Where it listens, e.g. ``http://127.0.0.1:8000``.
        tensor_parallel: Its number of ranks, ``--tensor-parallel-size`` of the server.
        name: The replica's name; by default made of host and port. Names must differ within a run.
        token: Bearer token sent with every call. vLLM's own ``--api-key`` does not guard these endpoints; a proxy may.
        connect_timeout_s: Most seconds `connect` may take.
        commit_timeout_s: Most seconds a commit may take; a server that needs longer is not trusted until the next one.
        staging_limit_bytes: Most memory a rank may use to stage a version; None leaves it at the server's default.
        commit: ``"in_place"`` writes versions in full into the weights as they come, while the server is paused; see
            `RolloutConfig.commit`. `commit_timeout_s` must then allow for the transfer.

    Raises:
        ConfigError: `url` is not one of a server.
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
    ) -> None:
        self.url, default_name = _checked(url)
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
        self._sound = True
        self._control = asyncio.Lock()

    @property
    def serving(self) -> bool:
        """False after a commit that left the weights in doubt, until a version has been committed."""
        return self._sound

    def subscriber_names(self) -> list[str]:
        """Under which names its ranks subscribe."""
        return [f"{self.name}/{rank}" for rank in range(self._ranks)]

    async def connect(
        self, rendezvous: Mapping[str, Any], backend: str, options: Mapping[str, Any] | None = None
    ) -> None:
        """Subscribe every rank to the publisher at `rendezvous`, leaving the one it was subscribed to before.

        The address holds the run's secret and is sent as it is: use the loopback interface, a private network or https.
        A server that is paused because a commit failed stays so until the next version commits.

        Raises:
            WorkerDiedError: Nothing answers at the address.
            ConfigError: The endpoints are off, the token is wrong, the number of ranks is another, or what a rank refuses.
            WeightlaneError: Whatever else a rank raised; none is subscribed then.
        """
        info = {
            "rendezvous": dict(rendezvous),
            "replica": self.name,
            "backend": backend,
            "options": dict(options or {}),
        }
        deadline = Deadline.after(self._connect_timeout_s)
        async with self._control, self._calls() as server:
            try:
                ranks = (await server.get("get_world_size", deadline)).get("world_size")
                if ranks != self._ranks:
                    raise ConfigError(
                        f"the server has {ranks} ranks, and tensor_parallel says {self._ranks}.",
                        part=self.name,
                        peer=self.url,
                        hint="Give tensor_parallel the server's --tensor-parallel-size; other parallelism is not supported.",
                    )
                await server.post("init_weight_transfer_engine", deadline, {"init_info": info | self._staging})
            except CallFailedError as cause:
                if isinstance(cause.failure.error, QuarantinedError):
                    self._sound = False
                    await _stop(server)
                raise _with_hint(cause.failure.error) from cause

    async def commit(self, version: int) -> CommitReport:
        """Put `version`, which every rank has staged, into service between two decode steps.

        Requests in flight stay: they compute their caches again and go on under the new weights.

        Raises:
            WorkerDiedError: The server does not answer.
            QuarantinedError: The weights cannot be trusted: requests in flight are ended, the server stays paused until a
                version has been committed, and `serving` is False.
            UntouchedError: Any other reason; every rank's weights are in place and the old version goes on serving.
        """
        before = self.version if self._sound else None
        report = await self._update({"version": version}, version)
        self._before, self.version = before, version
        return report

    async def rollback(self, version: int) -> None:
        """Serve what was served before `version` again, on every rank from the same step on. Nothing to do if it does.

        Raises:
            CommitError: It is not kept; `version` serves on.
            WeightlaneError: What `commit` raises.
        """
        if self._sound and (self.version is None or self.version < version):
            return
        if self.version != version or self._before is None:
            raise CommitError(f"version {version} cannot be taken back.", part=self.name, peer=self.url)
        await self._update({"rollback_of": version}, self._before)
        self.version, self._before = self._before, None

    async def quarantine(self, error: WeightlaneError) -> None:
        """End requests in flight and begin no more until a version has been committed; those that come meanwhile wait.

        Raises:
            WeightlaneError: The server could not be told.
        """
        _log.warning("%s is paused until a version commits: %s", self.name, error)
        self._sound = False
        async with self._control, self._calls() as server:
            try:
                await server.post("pause", Deadline.after(_CLEAN_UP_S), mode="abort", clear_cache="true")
            except CallFailedError as cause:
                raise cause.failure.error from cause

    def _calls(self) -> ServerCalls:
        return ServerCalls(self.url, self._token, self.name)

    async def _update(self, update: Mapping[str, int], serves: int) -> CommitReport:
        """Exchange the weights, in one call. The server calls them version `serves` from then on."""
        deadline = Deadline.after(self._commit_timeout_s)
        whole = WholeCommit(
            weight_version=str(serves), within_s=ENGINE_SHARE * self._commit_timeout_s, sound=self._sound
        )
        async with self._control, self._calls() as server:
            began = time.monotonic()
            try:
                info = {**update, "whole": whole.model_dump()}
                await server.post("update_weights", deadline, {"update_info": info})
            except asyncio.CancelledError:
                self._sound = False
                await _stop(server)
                raise
            except CallFailedError as cause:
                failure = cause.failure
                if self._sound and failure.intact:
                    raise untouched(failure.error, self.name) from cause
                self._sound = False
                answers = await _stop(server)
                if isinstance(failure.error, WorkerDiedError) and not answers:
                    raise failure.error from cause
                raise _distrusted(failure.error, self.name) from cause
            self._sound = True
            return CommitReport(serves, time.monotonic() - began)


async def _stop(server: ServerCalls) -> bool:
    """Pause a server whose weights are in doubt, and end what is in flight. Returns whether it did so.

    vLLM runs calls in order, so this waits for a load that has outlived its deadline.
    """
    try:
        await server.post("pause", Deadline.after(_CLEAN_UP_S), mode="abort", clear_cache="true")
    except CallFailedError:
        return False  # The caller has a better error to raise than this one's.
    return True


def _distrusted(error: WeightlaneError, name: str) -> WeightlaneError:
    if isinstance(error, QuarantinedError):
        return error
    return QuarantinedError(
        f"the commit did not end well and the weights cannot be trusted: {type(error).__name__}: {error}",
        part=name,
        hint="The server stays paused until a complete version has been committed.",
    )


def _with_hint(error: WeightlaneError) -> WeightlaneError:
    """What vLLM says when it runs without our engine, with what to do about it."""
    if "weight transfer not configured" in error.message.lower():
        return ConfigError(
            "the server was started without a weight-transfer engine.",
            part=error.part,
            peer=error.peer,
            hint="""Start it with --weight-transfer-config '{"backend": "weightlane"}'.""",
        )
    return error


def _checked(url: str) -> tuple[str, str]:
    """`url` without a trailing slash, and a name made of its host and port."""
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
