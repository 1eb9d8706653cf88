"""`FleetControl`: the run's side of ``weightlane scale``. It reads requests, and writes which replicas there are."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path

from weightlane.ckpt_engines import StorageError, as_weightlane_error
from weightlane.trainer.loop.fleet import Fleet
from weightlane.trainer.runner.run_dir import write_whole

from .scale_files import RECORD, REQUEST, FleetRecord, ScaleRequest, read_file

_POLL_S = 0.5
_BEATS_S = 10.0
"""Seconds between two `FleetRecord.beat`. The command waits for a multiple of it, since shared file systems are late."""


class FleetControl:
    """Scales a run as the files in its directory `path` ask for, while `following`.

    `check` raises the error of a number of replicas that the run cannot have. `say` prints a line for the user.
    """

    def __init__(
        self, path: Path, fleet: Fleet, check: Callable[[int], Awaitable[None]], say: Callable[[str], None]
    ) -> None:
        self._request, self._record = path / REQUEST, path / RECORD
        self._fleet, self._check, self._say = fleet, check, say
        self._key, self._refused = "", ""
        self._written: FleetRecord | None = None
        self._broken = False
        """Whether the last write failed."""

    @asynccontextmanager
    async def following(self) -> AsyncIterator[None]:
        """Follow requests inside the block. Older ones are dropped."""
        await asyncio.to_thread(_remove, self._request)
        await self._write()
        task = asyncio.create_task(self._follow(), name="fleet-control")
        try:
            yield
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
            await asyncio.to_thread(_remove, self._record)

    async def _follow(self) -> None:
        while True:
            request = await asyncio.to_thread(read_file, ScaleRequest, self._request)
            if request is not None and request.key != self._key:
                await self._obey(request)
            await self._write()
            await asyncio.sleep(_POLL_S)

    async def _obey(self, request: ScaleRequest) -> None:
        refused = ""
        try:
            await self._check(request.replicas)
            self._fleet.scale(request.replicas)
        except Exception as error:  # noqa: BLE001 - whatever it is, the command is to learn it
            refused = str(as_weightlane_error(error, "fleet"))
        self._key, self._refused = request.key, refused
        said = f": refused, {self._refused}" if self._refused else ""
        self._say(f"asked for {request.replicas} rollout replica(s) by weightlane scale{said}")

    async def _write(self) -> None:
        """Write the record if it has changed, or is to show that the run lives."""
        record = FleetRecord(
            host=socket.gethostname(),
            pid=os.getpid(),
            beat=int(asyncio.get_running_loop().time() / _BEATS_S),
            request=self._key,
            refused=self._refused,
            **self._fleet.state().to_plain(),
        )
        if record == self._written:
            return
        try:
            await asyncio.to_thread(write_whole, self._record, record.model_dump_json())
        except StorageError as error:
            if not self._broken:
                self._say(f"weightlane scale gets no answers: {error}")
            self._broken = True
        else:
            self._written, self._broken = record, False


def _remove(path: Path) -> None:
    with suppress(OSError):
        path.unlink()
