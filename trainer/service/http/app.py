"""The HTTP application: its routes, with authentication, errors and logging of every request."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from ..errors import UnknownError
from ..records.models import SAVE, SAVE_EXTERNAL, SAVE_FOR_SAMPLER, STEP
from ..service import Service
from . import listing, requests
from .auth import Clients
from .downloads import ROUTES as DOWNLOADS
from .downloads import DownloadLinks
from .errors import answered, problem

API = "/api/v1/"
_log = logging.getLogger("weightlane.service.http")

Handler = Callable[[Service, str, Request], Awaitable[Response]]

_POST: dict[str, Handler] = {
    "client/config": partial(requests.constant, answer=requests.CONFIG),
    "client/dynamic_config": partial(requests.constant, answer=requests.DYNAMIC_CONFIG),
    "create_session": requests.create_session,
    "session_heartbeat": requests.session_heartbeat,
    "sessions/{session}/finish": requests.finish_session,
    "telemetry": partial(requests.constant, answer=requests.TELEMETRY),
    "create_model": requests.create_model,
    "get_info": requests.get_info,
    "forward_backward": requests.forward_backward,
    "optim_step": partial(requests.train, kind=STEP),
    "save_weights": partial(requests.train, kind=SAVE),
    "save_weights_for_sampler": partial(requests.train, kind=SAVE_FOR_SAMPLER),
    "save_weights_external": partial(requests.train, kind=SAVE_EXTERNAL),
    "load_weights": requests.load_weights,
    "unload_model": requests.unload_model,
    "create_sampling_session": requests.create_sampling_session,
    "join_sampling_session": requests.join_sampling_session,
    "asample": requests.asample,
    "retrieve_future": requests.retrieve_future,
    "cancel_future": requests.cancel_future,
    "weights_info": listing.weights_info,
}
_GET: dict[str, Handler] = {
    "get_server_capabilities": listing.server_capabilities,
    "training_runs": listing.training_runs,
    "training_runs/{model}": listing.training_run,
    "training_runs/{model}/checkpoints": listing.checkpoints_of_run,
    "checkpoints": listing.checkpoints,
    "sessions": listing.sessions,
    "sessions/{session}": listing.session,
    "samplers/{sampler}": listing.sampler,
}
_CHECKPOINT = "training_runs/{model}/checkpoints/{checkpoint:path}"


def application(service: Service, clients: Clients) -> Starlette:
    """Make the application that serves `clients` with `service`."""
    links = DownloadLinks()
    unauthorized = partial(problem, 401, "the token is unknown.", **{"WWW-Authenticate": "Bearer"})

    def route(method: str, path: str, handler: Handler, *, signed: bool = False) -> Route:
        """A route for clients with a token, or for `signed` links, which need none."""

        async def endpoint(request: Request) -> Response:
            began = time.perf_counter()
            client = "" if signed else clients.of(request.headers)
            answer = unauthorized() if client is None else await answered(lambda: handler(service, client, request))
            facts = {
                "method": request.method,
                "path": request.url.path,
                "status": answer.status_code,
                "client": client or None,
                "ms": round((time.perf_counter() - began) * 1e3, 1),
            }
            _log.info(json.dumps(facts))
            return answer

        return Route(API + path, endpoint, methods=[method])

    async def health(_: Request) -> Response:
        return JSONResponse({"status": "ok"})

    async def metrics(request: Request) -> Response:
        if clients.of(request.headers) is None:
            return unauthorized()
        lines = [f"weightlane_service_{name} {value:.15g}" for name, value in sorted(service.figures().items())]
        return PlainTextResponse("\n".join(lines) + "\n", media_type="text/plain; version=0.0.4")

    async def unknown(request: Request, _: Any) -> Response:
        said = f"{request.method} {request.url.path} is not offered here; docs/guides/service.md lists what is."
        client = clients.of(request.headers)
        if client is not None and request.method == "POST":
            await requests.refuse(service, client, request, UnknownError(said))
        return problem(404, said)

    return Starlette(
        routes=[
            Route(API + "healthz", health),
            Route("/metrics", metrics),
            route("GET", f"{_CHECKPOINT}/archive", links.archive),
            route("GET", f"{_CHECKPOINT}/external_weights_urls", links.files),
            route("DELETE", _CHECKPOINT, listing.delete_checkpoint),
            route("PUT", f"{_CHECKPOINT}/ttl", listing.set_ttl),
            *(route("GET", path, links.download, signed=True) for path in DOWNLOADS),
            *(route("POST", path, handler) for path, handler in _POST.items()),
            *(route("GET", path, handler) for path, handler in _GET.items()),
        ],
        exception_handlers={404: unknown, 405: unknown},
    )
