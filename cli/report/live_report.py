"""`PageServer`: serves the page of a run over HTTP on loopback while the run continues."""

from __future__ import annotations

import http.server
import urllib.parse
from collections.abc import Callable, Mapping
from typing import Any

from weightlane.ckpt_engines import AddressInUseError, WeightlaneError
from weightlane.plugins.prometheus import LOOPBACK, is_loopback

from ..output import http_address
from .html_report import json_of, page_of

_REQUEST_TIMEOUT_S = 10.0
"""Longest time a client may leave its connection silent."""


class PageServer(http.server.ThreadingHTTPServer):
    """Serves a page at ``/``, and its record, which `read` reads again each time, at ``/record.json``.

    It answers only requests whose ``Host`` header is a loopback address or ``localhost``, so that a web page in a browser on this
    machine can't read it under a host name of its own (DNS rebinding). Raises `AddressInUseError` when it can't listen on `port`.
    """

    daemon_threads = True

    def __init__(self, read: Callable[[], Mapping[str, Any]], port: int) -> None:
        self.record = read
        try:
            super().__init__((LOOPBACK, port), _Handler)
        except OSError as error:
            raise AddressInUseError(
                f"cannot serve on {LOOPBACK}:{port}: {error.strerror or error}.",
                part="report",
                hint="Choose another --port; 0 takes a free one.",
            ) from error

    @property
    def url(self) -> str:
        """The URL of the page."""
        return f"{http_address(LOOPBACK, self.server_port)}/"


class _Handler(http.server.BaseHTTPRequestHandler):
    server: PageServer
    timeout = _REQUEST_TIMEOUT_S

    def do_GET(self) -> None:
        """Answer with the page or the record."""
        answers: dict[str, tuple[str, Callable[[Mapping[str, Any]], str]]] = {
            "/": ("text/html; charset=utf-8", page_of),
            "/record.json": ("application/json", json_of),
        }
        found = answers.get(urllib.parse.urlsplit(self.path).path)
        if not is_loopback(urllib.parse.urlsplit(f"//{self.headers.get('Host', '')}").hostname or ""):
            self._answer(403, "text/plain; charset=utf-8", "Ask for 127.0.0.1 or localhost.")
        elif found is None:
            self._answer(404, "text/plain; charset=utf-8", "There is / and /record.json.")
        else:
            media, text_of = found
            try:
                self._answer(200, media, text_of(self.server.record()))
            except WeightlaneError as error:
                self._answer(500, "text/plain; charset=utf-8", str(error))

    def _answer(self, status: int, media: str, text: str) -> None:
        body = text.encode()
        self.send_response(status)
        for name, value in (
            ("Content-Type", media),
            ("Content-Length", str(len(body))),
            ("Cache-Control", "no-store"),
            ("X-Content-Type-Options", "nosniff"),
        ):
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Print nothing, because the command's output is for the URL."""
