"""Handlers of the requests that list a client's models, checkpoints, sessions and samplers, and manage its checkpoints."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from weightlane.ckpt_engines import ConfigError

from ..errors import UnknownError
from ..records.checkpoints import Checkpoint
from ..service import Service
from ..wire.requests import CheckpointTtlRequest, WeightsInfoRequest
from ..wire.requests import request as parsed
from .downloads import checkpoint_path
from .errors import read_body

_MOST = 1000
_DIGITS = 9


async def server_capabilities(service: Service, client: str, request: Request) -> Response:
    """The base models of the service, of which there is one."""
    del client, request
    base = service.base
    offered = {"model_name": base.name, "max_context_length": base.max_length, "trainable": True, "sampleable": True}
    return JSONResponse({"supported_models": [offered]})


async def weights_info(service: Service, client: str, request: Request) -> Response:
    """The facts that a client needs to load a checkpoint."""
    asked = parsed(WeightsInfoRequest, await read_body(request, service.config.max_body_bytes))
    found = service.checkpoints.get(asked.tinker_path, client)
    train = found.about.get("train") or {}
    return JSONResponse(
        {
            "base_model": service.base.name,
            "is_lora": found.config is not None,
            "lora_rank": None if found.config is None else found.config.rank,
            "train_attn": train.get("attention"),
            "train_mlp": train.get("mlp"),
            "train_unembed": train.get("unembed"),
        }
    )


async def training_runs(service: Service, client: str, request: Request) -> Response:
    """A client's models, most recently used first."""
    query = "SELECT id, used, state, about FROM models WHERE client = ? ORDER BY used DESC"
    rows, cursor = _page(request, service.store.rows(query, client))
    return JSONResponse({"training_runs": [_run(service, client, row) for row in rows], "cursor": cursor})


async def training_run(service: Service, client: str, request: Request) -> Response:
    """One of a client's models."""
    query = "SELECT id, used, state, about FROM models WHERE client = ? AND id = ?"
    row = service.store.row(query, client, request.path_params["model"])
    if row is None:
        raise UnknownError(f"there is no model {request.path_params['model']}.", part="service")
    return JSONResponse(_run(service, client, row))


async def checkpoints_of_run(service: Service, client: str, request: Request) -> Response:
    """The checkpoints of one model."""
    found = service.checkpoints.of_client(client, request.path_params["model"])
    return JSONResponse({"checkpoints": [_checkpoint(each) for each in found]})


async def checkpoints(service: Service, client: str, request: Request) -> Response:
    """All checkpoints of a client."""
    rows, cursor = _page(request, service.checkpoints.of_client(client))
    return JSONResponse({"checkpoints": [_checkpoint(each) for each in rows], "cursor": cursor})


async def delete_checkpoint(service: Service, client: str, request: Request) -> Response:
    """Delete a checkpoint."""
    service.checkpoints.delete(checkpoint_path(request), client)
    return JSONResponse({})


async def set_ttl(service: Service, client: str, request: Request) -> Response:
    """Set when a checkpoint expires."""
    asked = parsed(CheckpointTtlRequest, await read_body(request, service.config.max_body_bytes))
    service.checkpoints.set_ttl(checkpoint_path(request), client, asked.ttl_seconds)
    return JSONResponse({})


async def sessions(service: Service, client: str, request: Request) -> Response:
    """A client's sessions, newest first."""
    query = "SELECT id FROM sessions WHERE client = ? ORDER BY created DESC"
    rows, _ = _page(request, service.store.rows(query, client))
    return JSONResponse({"sessions": [row["id"] for row in rows]})


async def session(service: Service, client: str, request: Request) -> Response:
    """The models and samplers of one session."""
    name = request.path_params["session"]
    row = service.store.row("SELECT about FROM sessions WHERE client = ? AND id = ?", client, name)
    if row is None:
        raise UnknownError(f"there is no session {name}.", part="service")
    models = service.store.rows("SELECT id FROM models WHERE session = ?", name)
    samplers = service.store.rows("SELECT id FROM samplers WHERE session = ?", name)
    return JSONResponse(
        {
            "training_run_ids": [each["id"] for each in models],
            "sampler_ids": [each["id"] for each in samplers],
            "user_metadata": row["about"].get("user_metadata"),
            "display_name": row["about"].get("display_name"),
        }
    )


async def sampler(service: Service, client: str, request: Request) -> Response:
    """Describe a sampler."""
    found = service.samplers.get(request.path_params["sampler"], client)
    return JSONResponse({"sampler_id": found.id, "base_model": service.base.name, "model_path": found.checkpoint})


def _page(request: Request, rows: list[Any]) -> tuple[list[Any], dict[str, int]]:
    limit, offset = (_number(request, name, default) for name, default in (("limit", 100), ("offset", 0)))
    limit = min(limit, _MOST)
    return rows[offset : offset + limit], {"offset": offset, "limit": limit, "total_count": len(rows)}


def _number(request: Request, name: str, default: int) -> int:
    text = request.query_params.get(name, str(default))
    if not text.isascii() or not text.isdigit() or len(text) > _DIGITS:
        raise ConfigError(f"{name} is {text!r}, which is no number from 0.", part="service")
    return int(text)


def _time(seconds: float | None) -> str | None:
    return None if seconds is None else datetime.fromtimestamp(seconds, UTC).isoformat()


def _checkpoint(found: Checkpoint) -> dict[str, Any]:
    return {
        "checkpoint_id": found.id,
        "checkpoint_type": found.kind,
        "time": _time(found.created),
        "tinker_path": found.path,
        "size_bytes": found.bytes,
        "user_metadata": found.about.get("user_metadata"),
        "expires_at": _time(found.expires),
    }


def _run(service: Service, client: str, row: Mapping[str, Any]) -> dict[str, Any]:
    saved = service.checkpoints.of_client(client, row["id"])
    last = {
        kind: next((_checkpoint(each) for each in saved if each.kind == kind), None) for kind in ("training", "sampler")
    }
    return {
        "training_run_id": row["id"],
        "base_model": service.base.name,
        "model_owner": client,
        "is_lora": row["about"]["config"] is not None,
        "corrupted": row["state"] == "damaged",
        "lora_rank": (row["about"]["config"] or {}).get("rank"),
        "last_request_time": _time(row["used"]),
        "last_checkpoint": last["training"],
        "last_sampler_checkpoint": last["sampler"],
        "user_metadata": row["about"].get("user_metadata"),
    }
