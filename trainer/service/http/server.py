"""The HTTP server, which runs until the service ends."""

from __future__ import annotations

import asyncio
import errno
import socket
from collections.abc import Iterator
from contextlib import contextmanager

import uvicorn

from weightlane.ckpt_engines import AddressInUseError, ConfigError

from ...loop.environments.agents.endpoint import Server
from ..service import Service
from .app import application
from .auth import Clients

_AFTER_DEATH_S = 5.0
"""Most seconds that requests have to finish after a death: requests that the death affects fail within this time."""
_KEEP_ALIVE_S = 75
"""Seconds that an idle connection stays open: longer than a client waits between two requests of a running job."""


@contextmanager
def listening(host: str, port: int) -> Iterator[socket.socket]:
    """Open a socket on which nothing is answered yet.

    Raises `AddressInUseError`, or `ConfigError` if `host` is no address of this machine.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # asyncio sets TCP_NODELAY only if the protocol is given. Without it, answers wait for delayed acknowledgements.
    with socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((host, port))
        except (OSError, TypeError, ValueError) as cause:  # the last two are about names that no machine can have
            text = f"{host}:{port} cannot be listened on: {getattr(cause, 'strerror', cause)}."
            if getattr(cause, "errno", None) in (errno.EADDRINUSE, errno.EACCES):
                raise AddressInUseError(text, part="service", hint="Set service.port to a free one.") from cause
            raise ConfigError(text, part="service", hint="Set service.host to an address of this machine.") from cause
        yield listener


async def serve(service: Service, clients: Clients, listener: socket.socket, ended: asyncio.Event) -> None:
    """Answer requests until `ended`, then shut down. Raises an error that ends the service before, such as a rank's death."""
    shutdown_s = service.config.shutdown_s
    server = Server(
        uvicorn.Config(
            application(service, clients),
            lifespan="off",
            log_config=None,
            access_log=False,
            timeout_keep_alive=_KEEP_ALIVE_S,
            timeout_graceful_shutdown=max(1, int(shutdown_s)),
        )
    )
    tasks = [
        asyncio.create_task(server.serve([listener]), name="http"),
        asyncio.create_task(service.run(), name="service"),
        asyncio.create_task(ended.wait(), name="signal"),
    ]
    done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    service.futures.close()
    server.should_exit = True
    wait_s = shutdown_s if ended.is_set() else min(shutdown_s, _AFTER_DEATH_S)
    await asyncio.wait(tasks[:1], timeout=wait_s + 1)
    await service.close(wait_s)
    for each in tasks:
        each.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    for each in done:
        each.result()
