"""`Relay`: one address for all episodes, which gives each call the key of its episode.

verifiers keeps an HTTP client for every key that it has seen, with a TLS context of its own, until the environment ends.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Self

import aiohttp
from aiohttp import web

SESSION = "X-Session-ID"
"""Header by which verifiers names the trace that a call belongs to."""


class Relay:
    """Passes calls on to the endpoint of the run, while its context lasts. It listens on loopback."""

    def __init__(self) -> None:
        self.clients: dict[str, Mapping[str, str]] = {}
        """``base_url`` and ``api_key`` of the episode, by the id of a trace of it."""
        self.base_url = ""

    async def __aenter__(self) -> Self:
        self._http = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout())
        app = web.Application(client_max_size=0)  # the endpoint has a limit
        app.router.add_route("*", "/v1/{path:.*}", self._pass_on)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        host, port = self._runner.addresses[0][:2]
        self.base_url = f"http://{host}:{port}/v1"
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._runner.cleanup()
        await self._http.close()

    async def _pass_on(self, request: web.Request) -> web.Response:
        client = self.clients.get(request.headers.get(SESSION, ""))
        if client is None:
            return web.json_response({"error": {"message": "the call is of no episode."}}, status=401)
        url = f"{client['base_url']}/{request.match_info['path']}"
        headers = {"Authorization": f"Bearer {client['api_key']}", "Content-Type": "application/json"}
        async with self._http.request(request.method, url, data=await request.read(), headers=headers) as answer:
            return web.Response(status=answer.status, body=await answer.read(), content_type=answer.content_type)
