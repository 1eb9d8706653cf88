"""Handlers of the requests that train and sample."""

from __future__ import annotations

from contextlib import suppress
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from weightlane.ckpt_engines import WeightlaneError

from ..errors import TooLargeError
from ..records.futures import ERROR, JSON
from ..records.models import LOAD, REFUSED, UNLOAD
from ..service import Service
from ..wire import requests as wire
from ..wire.bodies import address_of, decompressed
from ..wire.sampling_requests import CreateSamplingSessionRequest, JoinSamplingSessionRequest, SampleRequest
from .errors import encoding_of, read_body, receive

_WAIT_S = 25.0
"""Seconds for which a request for an answer is held open; the SDK gives up after 45."""
_NO_UNEMBED = "Adapters are beside the linear layers of decoder layers: train_unembed has no effect here."
_NO_ADAPTER = "Models here are all weights, no adapters: rank, seed and train_* of a lora_config have no effect."


CONFIG = {
    "pjwt_auth_enabled": False,
    "parallel_fwdbwd_chunks": True,
    "proto_compress_fwdbwd": True,
    # For SDKs before 0.30, which would send batches as JSON without the next two.
    "proto_write_fwdbwd": True,
    "fwd_via_fwdbwd": True,
}
"""The SDK's switches, which choose its simplest protocols."""
DYNAMIC_CONFIG = {"sample_cancel_enabled": True}
"""The SDK's switches that may change."""
TELEMETRY = {"status": "accepted"}
"""The answer to the SDK's telemetry, which is discarded."""


async def constant(service: Service, _: str, request: Request, *, answer: dict[str, Any]) -> Response:
    """Give every request the same answer."""
    await read_body(request, service.config.max_body_bytes)
    return JSONResponse(answer)


async def create_session(service: Service, client: str, request: Request) -> Response:
    """Begin a session."""
    asked, _ = await _parsed(service, request, wire.CreateSessionRequest)
    about = {"tags": asked.tags, "user_metadata": asked.user_metadata or {}, "display_name": asked.display_name}
    session = service.sessions.create(client, about)
    message = _NO_ADAPTER if service.config.trains_weights else _NO_UNEMBED
    return JSONResponse({"type": "create_session", "session_id": session, "info_message": message})


async def session_heartbeat(service: Service, client: str, request: Request) -> Response:
    """Record a session's heartbeat."""
    asked, _ = await _parsed(service, request, wire.SessionHeartbeatRequest)
    service.sessions.seen(asked.session_id, client)
    return JSONResponse({"type": "session_heartbeat"})


async def finish_session(service: Service, client: str, request: Request) -> Response:
    """End a session."""
    await read_body(request, service.config.max_body_bytes)
    service.sessions.end(request.path_params["session"], client, "finished by its client")
    return JSONResponse({})


async def create_model(service: Service, client: str, request: Request) -> Response:
    """Create a model."""
    asked, payload = await _parsed(service, request, wire.CreateModelRequest)
    accepted = service.create_model(client, asked, payload)
    return JSONResponse({"request_id": accepted.id, "model_id": accepted.owner})


async def get_info(service: Service, client: str, request: Request) -> Response:
    """Describe a model."""
    asked, _ = await _parsed(service, request, wire.GetInfoRequest)
    model, base = service.scheduler.model(asked.model_id, client), service.base
    return JSONResponse(
        {
            "type": "get_info",
            "model_id": model.id,
            "model_name": base.name,
            "model_data": {"arch": base.architecture, "model_name": base.name, "tokenizer_id": str(base.directory)},
            "is_lora": model.config is not None,
            "lora_rank": None if model.config is None else model.config.rank,
        }
    )


async def refuse(service: Service, client: str, request: Request, error: WeightlaneError) -> None:
    """Answer a request that is not offered by `error`, under its number if it names its model, so that later ones don't wait."""
    with suppress(WeightlaneError):
        asked, payload = await _parsed(service, request, wire.AddressedRequest)
        service.train(client, REFUSED, asked.model_id, asked.seq_id, payload, error)


async def forward_backward(service: Service, client: str, request: Request) -> Response:
    """Compute a loss, and its gradient unless the request says not to.

    A request whose body is too large fails in its turn, because its client continues from its number, which is at the beginning
    of the body.
    """
    sent = await receive(request, service.config.max_body_bytes)
    try:
        body = decompressed(sent, encoding_of(request), service.config.max_body_bytes)
    except TooLargeError as error:
        return _future(service.refuse_backward(client, address_of(sent, encoding_of(request)), error).id)
    return _future(service.backward(client, body).id)


async def train(service: Service, client: str, request: Request, *, kind: str) -> Response:
    """Accept a request of a model. The rest of it is checked in its turn, because later requests continue from its number."""
    asked, payload = await _parsed(service, request, wire.AddressedRequest)
    return _future(service.train(client, kind, asked.model_id, asked.seq_id, payload).id)


async def load_weights(service: Service, client: str, request: Request) -> Response:
    """Load a checkpoint into a model, or as a new model."""
    asked, payload = await _parsed(service, request, wire.LoadWeightsRequest)
    if asked.session_id is not None:
        accepted = service.load_as_model(client, asked, payload)
    else:
        accepted = service.train(client, LOAD, asked.model_id or "", asked.seq_id or 0, payload)
    return _future(accepted.id, model_id=accepted.owner)


async def unload_model(service: Service, client: str, request: Request) -> Response:
    """Unload a model, after the requests that were sent before."""
    asked, payload = await _parsed(service, request, wire.UnloadModelRequest)
    model = service.scheduler.model(asked.model_id, client)
    seq = max([model.next_seq - 1, *model.waiting]) + 1
    return _future(service.train(client, UNLOAD, asked.model_id, seq, payload).id)


async def create_sampling_session(service: Service, client: str, request: Request) -> Response:
    """Create a sampler."""
    asked, _ = await _parsed(service, request, CreateSamplingSessionRequest)
    sampler = service.create_sampler(
        client, asked.session_id, asked.sampling_session_seq_id, asked.base_model, asked.model_path
    )
    return JSONResponse({"type": "create_sampling_session", "sampling_session_id": sampler.id})


async def join_sampling_session(service: Service, client: str, request: Request) -> Response:
    """Give a copy of a sampling client, in another process, a number of its own."""
    asked, _ = await _parsed(service, request, JoinSamplingSessionRequest)
    service.sampler(asked.sampling_session_id, client)
    number = service.samplers.join(asked.sampling_session_id)
    return JSONResponse({"type": "join_sampling_session", "client_counter": number})


async def asample(service: Service, client: str, request: Request) -> Response:
    """Accept a sampling request."""
    asked, payload = await _parsed(service, request, SampleRequest)
    accepted = service.sample(client, asked, payload)
    names = [f"{accepted.id}:{index}" for index in range(asked.num_samples)]
    return _future(accepted.id, sample_sequence_ids=names)


async def retrieve_future(service: Service, client: str, request: Request) -> Response:
    """The answer to an earlier request, for which the client waits up to `_WAIT_S` seconds."""
    asked, _ = await _parsed(service, request, wire.FutureRetrieveRequest)
    found = await service.futures.wait(asked.request_id, client, _WAIT_S)
    if found is None:
        return JSONResponse({"detail": f"there is no request {asked.request_id}."}, 410)
    if found.state == "queued":
        return JSONResponse({"type": "try_again", "request_id": found.id, "queue_state": "active"})
    return Response(found.answer, media_type=JSON if found.media == ERROR else found.media)


async def cancel_future(service: Service, client: str, request: Request) -> Response:
    """Cancel a sampling request."""
    asked, _ = await _parsed(service, request, wire.CancelFutureRequest)
    if await service.futures.wait(asked.request_id, client, 0) is not None:
        service.samplers.cancel(asked.request_id)
    return JSONResponse({})


async def _parsed(service: Service, request: Request, form: type[wire.AnyRequest]) -> tuple[wire.AnyRequest, bytes]:
    body = await read_body(request, service.config.max_body_bytes)
    return wire.request(form, body), body


def _future(request: str, **more: Any) -> Response:
    return JSONResponse({"request_id": request, **more})
