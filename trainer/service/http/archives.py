"""Downloads of checkpoints: links that need no token, as the SDK hands them on, and the archives behind them."""

from __future__ import annotations

import hmac
import re
import secrets
import tarfile
import time
from collections.abc import Iterator
from email.utils import formatdate
from pathlib import Path
from urllib.parse import quote, urlencode

from starlette.requests import Request
from starlette.responses import RedirectResponse, Response, StreamingResponse

from ..errors import UnknownError
from ..service import Service

ROUTE = "archives/{model}/{checkpoint:path}"
"""Where the links lead, below the prefix of all routes."""
_KEPT_S = 900
"""Seconds for which a link is good."""
_CHUNK = 1 << 20


class ArchiveLinks:
    """Makes links to checkpoints, and answers them. They are good for a quarter of an hour, and until the service ends."""

    def __init__(self) -> None:
        self._key = secrets.token_bytes(32)

    async def link(self, service: Service, client: str, request: Request) -> Response:
        """Lead to a checkpoint's archive. The address says for whom, and is signed, so that it needs no token."""
        path = checkpoint_path(request)
        service.checkpoints.get(path, client)
        expires = int(time.time()) + _KEPT_S
        query = urlencode({"client": client, "expires": expires, "signature": self._signature(path, client, expires)})
        base = str(request.url).partition("/training_runs/")[0]
        location = f"{base}/archives/{quote(path.removeprefix('tinker://'))}?{query}"
        return RedirectResponse(location, 302, headers={"Expires": formatdate(expires, usegmt=True)})

    async def download(self, service: Service, request: Request) -> Response:
        """A checkpoint's files in one tar. Raises `UnknownError` unless the link is one of ours."""
        path, asked = checkpoint_path(request), request.query_params
        client, expires = asked.get("client", ""), asked.get("expires", "")
        good = re.fullmatch(r"[0-9]{1,12}", expires) is not None and int(expires) > time.time()
        if not good or not hmac.compare_digest(
            self._signature(path, client, int(expires)).encode(), asked.get("signature", "").encode()
        ):
            raise UnknownError("the link is not good, or no longer.", part="service", hint="Ask for a new one.")
        files = sorted(service.checkpoints.get(path, client).directory.iterdir())
        headers = {"Content-Disposition": 'attachment; filename="checkpoint.tar"'}
        return StreamingResponse(_packed(files), media_type="application/x-tar", headers=headers)

    def _signature(self, path: str, client: str, expires: int) -> str:
        return hmac.digest(self._key, f"{client}\n{path}\n{expires}".encode(), "sha256").hex()


def checkpoint_path(request: Request) -> str:
    """The path of the checkpoint that a request's address names."""
    return f"tinker://{request.path_params['model']}/{request.path_params['checkpoint']}"


def _packed(files: list[Path]) -> Iterator[bytes]:
    """A tar of `files`, a piece at a time, so that none is in memory as a whole."""
    for path in files:
        with path.open("rb") as file:
            header = tarfile.TarInfo(path.name)
            header.size = left = path.stat().st_size
            yield header.tobuf()
            while left:
                piece = file.read(min(_CHUNK, left))
                if not piece:
                    raise EOFError(f"{path} became shorter while it was read")
                left -= len(piece)
                yield piece
            yield b"\0" * (-header.size % tarfile.BLOCKSIZE)
    yield b"\0" * 2 * tarfile.BLOCKSIZE
