"""Downloads of checkpoints: links that need no token, because the SDK passes them on, and the files that they lead to."""

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
"""Routes of the links, relative to the prefix of all routes: a checkpoint as one tar, and one of its files."""
_KEPT_S = 900
"""Seconds for which a link is valid. The SDK asks for new ones when fewer than 300 are left."""
_CHUNK = 1 << 20
_PART = "service"


class DownloadLinks:
    """Makes links to checkpoints, and answers them. They are valid for a quarter of an hour, or until the service ends."""

    def __init__(self) -> None:
        self._key = secrets.token_bytes(32)

    async def archive(self, service: Service, client: str, request: Request) -> Response:
        """Redirect to a checkpoint as one tar, as SDKs before 0.38 download it."""
        path, expires = checkpoint_path(request), _expires()
        service.checkpoints.get(path, client)
        link = self._link(request, f"archives/{path.removeprefix('tinker://')}", client, expires)
        return RedirectResponse(link, 302, headers={"Expires": formatdate(expires, usegmt=True)})

    async def files(self, service: Service, client: str, request: Request) -> Response:
        """Answer with a link to each of a checkpoint's files, as the SDK downloads them since 0.38."""
        path, expires = checkpoint_path(request), _expires()
        urls = {
            file.name: self._link(request, f"files/{path.removeprefix('tinker://')}/{file.name}", client, expires)
            for file in _files(service, path, client)
        }
        return JSONResponse({"urls": urls, "expires": datetime.fromtimestamp(expires, UTC).isoformat()})

    async def download(self, service: Service, _: str, request: Request) -> Response:
        """Answer with the tar or the file of a link. Raises `UnknownError` unless the link is one of ours and has not expired."""
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
        """A link to `address`, relative to the prefix of all routes. It names the client and is signed, so it needs no token."""
        signature = self._signature(address, client, expires)
        query = urlencode({"client": client, "expires": expires, "signature": signature})
        return f"{str(request.url).partition('/training_runs/')[0]}/{quote(address)}?{query}"

    def _signature(self, address: str, client: str, expires: int) -> str:
        return hmac.digest(self._key, f"{client}\n{address}\n{expires}".encode(), "sha256").hex()


def checkpoint_path(request: Request) -> str:
    """The ``tinker://`` path of the checkpoint in a request's URL."""
    return f"tinker://{request.path_params['model']}/{request.path_params['checkpoint']}"


def _expires() -> int:
    """Expiry of a link that is made now, in seconds since 1970."""
    return int(time.time()) + _KEPT_S


def _files(service: Service, path: str, client: str) -> list[Path]:
    """The files of a checkpoint, sorted by name. A name in a link is looked up among them, so it cannot reach any other file."""
    return sorted(service.checkpoints.get(path, client).directory.iterdir())


def _stream(pieces: Iterator[bytes], media_type: str, name: str) -> Response:
    """An answer that streams `pieces`, to be saved as `name`.

    It does not declare its length, but ends with an empty chunk. Python's urllib, which the SDK uses, accepts a body that ends
    before its declared length as complete, but raises if the last chunk is missing.
    """
    headers = {"Content-Disposition": f'attachment; filename="{name}"'}
    return StreamingResponse(pieces, media_type=media_type, headers=headers)


def _pieces(path: Path, size: int) -> Iterator[bytes]:
    """Yield the `size` bytes of a file in pieces, so that the file is never completely in memory.

    Raises `StorageError` if there are fewer: the answer then lacks its last chunk, and is not taken for a complete one.
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
    """Yield a tar of `files`, in pieces."""
    for path in files:
        header = tarfile.TarInfo(path.name)
        header.size = path.stat().st_size
        yield header.tobuf()
        yield from _pieces(path, header.size)
        yield b"\0" * (-header.size % tarfile.BLOCKSIZE)
    yield b"\0" * 2 * tarfile.BLOCKSIZE
