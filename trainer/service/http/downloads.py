"""Downloads of checkpoints: links that need no token, as the SDK hands them on, and the files behind them."""

from __future__ import annotations

import hmac
import re
import secrets
import tarfile
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from email.utils import formatdate
from pathlib import Path
from urllib.parse import quote, urlencode

from starlette.requests import Request
from starlette.responses import JSONResponse, RedirectResponse, Response, StreamingResponse

from weightlane.ckpt_engines import StorageError

from ..errors import UnknownError
from ..service import Service

ROUTES = ("archives/{model}/{checkpoint:path}", "files/{model}/{kind}/{name}/{file}")
"""Where the links lead, below the prefix of all routes: to a checkpoint as one tar, and to one of its files."""
_KEPT_S = 900
"""Seconds for which a link is good. The SDK asks for new ones when fewer than 300 are left."""
_CHUNK = 1 << 20
_PART = "service"


class DownloadLinks:
    """Makes links to checkpoints, and answers them. They are good for a quarter of an hour, and until the service ends."""

    def __init__(self) -> None:
        self._key = secrets.token_bytes(32)

    async def archive(self, service: Service, client: str, request: Request) -> Response:
        """Lead to a checkpoint as one tar, as SDKs before 0.38 download it."""
        path, expires = checkpoint_path(request), _expires()
        service.checkpoints.get(path, client)
        link = self._link(request, f"archives/{path.removeprefix('tinker://')}", client, expires)
        return RedirectResponse(link, 302, headers={"Expires": formatdate(expires, usegmt=True)})

    async def files(self, service: Service, client: str, request: Request) -> Response:
        """Name a link to each of a checkpoint's files, as the SDK downloads them since 0.38."""
        path, expires = checkpoint_path(request), _expires()
        urls = {
            file.name: self._link(request, f"files/{path.removeprefix('tinker://')}/{file.name}", client, expires)
            for file in _files(service, path, client)
        }
        return JSONResponse({"urls": urls, "expires": datetime.fromtimestamp(expires, UTC).isoformat()})

    async def download(self, service: Service, request: Request) -> Response:
        """The tar or the file to which a link leads. Raises `UnknownError` unless the link is one of ours, and still good."""
        named, asked = request.path_params, request.query_params
        what, name = ("files", named["file"]) if "file" in named else ("archives", None)
        client, expires = asked.get("client", ""), asked.get("expires", "")
        good = re.fullmatch(r"[0-9]{1,12}", expires) is not None and int(expires) > time.time()
        expected = self._signature("/".join([what, *named.values()]), client, int(expires) if good else 0)
        if not good or not hmac.compare_digest(expected.encode(), asked.get("signature", "").encode()):
            raise UnknownError("the link is not good, or no longer.", part=_PART, hint="Ask for a new one.")
        checkpoint = "/".join(list(named.values())[:3]) if name else "/".join(named.values())
        files = _files(service, f"tinker://{checkpoint}", client)
        if name is None:
            return _stream(_packed(files), "application/x-tar", "checkpoint.tar")
        found = next((file for file in files if file.name == name), None)
        if found is None:
            raise UnknownError(
                f"there is no file {name[:80]!r} in tinker://{checkpoint}.", part=_PART, hint="Ask for its links again."
            )
        return _stream(_pieces(found, found.stat().st_size), "application/octet-stream", name)

    def _link(self, request: Request, address: str, client: str, expires: int) -> str:
        """A link to `address`, below the prefix of all routes. It says for whom it is, and is signed, so it needs no token."""
        signature = self._signature(address, client, expires)
        query = urlencode({"client": client, "expires": expires, "signature": signature})
        return f"{str(request.url).partition('/training_runs/')[0]}/{quote(address)}?{query}"

    def _signature(self, address: str, client: str, expires: int) -> str:
        return hmac.digest(self._key, f"{client}\n{address}\n{expires}".encode(), "sha256").hex()


def checkpoint_path(request: Request) -> str:
    """The path of the checkpoint that a request's address names."""
    return f"tinker://{request.path_params['model']}/{request.path_params['checkpoint']}"


def _expires() -> int:
    """When a link that is made now ends to be good, in seconds since 1970."""
    return int(time.time()) + _KEPT_S


def _files(service: Service, path: str, client: str) -> list[Path]:
    """The files of a checkpoint, by name. A name in a link is looked up among theirs, and so leads to no other file."""
    return sorted(service.checkpoints.get(path, client).directory.iterdir())


def _stream(pieces: Iterator[bytes], media_type: str, name: str) -> Response:
    """An answer of `pieces`, to be kept under `name`.

    It does not declare its length, but ends with an empty chunk. Python's urllib, by which the SDK reads, takes a body that
    ends before its declared length for a whole one, and raises where the last chunk is missing.
    """
    headers = {"Content-Disposition": f'attachment; filename="{name}"'}
    return StreamingResponse(pieces, media_type=media_type, headers=headers)


def _pieces(path: Path, size: int) -> Iterator[bytes]:
    """The `size` bytes of a file, a piece at a time, so that none is in memory as a whole.

    Raises `StorageError` if there are fewer: the answer then lacks its end, and is not taken for a whole one.
    """
    with path.open("rb") as file:
        left = size
        while left:
            piece = file.read(min(_CHUNK, left))
            if not piece:
                raise StorageError(f"{path} became shorter while it was read.", part=_PART)
            left -= len(piece)
            yield piece


def _packed(files: list[Path]) -> Iterator[bytes]:
    """A tar of `files`."""
    for path in files:
        header = tarfile.TarInfo(path.name)
        header.size = path.stat().st_size
        yield header.tobuf()
        yield from _pieces(path, header.size)
        yield b"\0" * (-header.size % tarfile.BLOCKSIZE)
    yield b"\0" * 2 * tarfile.BLOCKSIZE
