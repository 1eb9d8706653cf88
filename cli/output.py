"""Consoles for the command's output. Output of other modules is kept out of it, and foreign text is shown unchanged."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from typing import IO, TextIO

from rich.console import Console


def console(file: IO[str] | None = None, *, stderr: bool = False, soft_wrap: bool = True) -> Console:
    """Return a console that colours the command's own markup only, and shows ``:X:`` as text rather than as an emoji.

    Square brackets are markup in every text but a `rich.text.Text`: pass foreign text through `escape`.
    """
    return Console(file=file, stderr=stderr, soft_wrap=soft_wrap, highlight=False, emoji=False)


def http_address(host: str, port: int) -> str:
    """Return the address at which clients find a server, ``http://127.0.0.1:8000``. Addresses of IPv6 are in brackets."""
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


@contextlib.contextmanager
def own_stdout() -> Iterator[TextIO]:
    """Yield standard output for the command. Everything else that is printed meanwhile goes to standard error.

    An engine's module may print when it is imported, from Python or from a library directly to file descriptor 1. Neither may
    corrupt the command's JSON.
    """
    before = sys.stdout
    before.flush()
    redirected = before is not sys.__stdout__
    if redirected:  # by a caller, which may need descriptor 1 itself
        with contextlib.redirect_stdout(sys.stderr):
            yield before
        return
    with os.fdopen(os.dup(1), "w", encoding=before.encoding, errors=before.errors) as ours:
        os.dup2(2, 1)
        try:
            yield ours
        finally:
            before.flush()  # text in its buffer, while descriptor 1 still is standard error
            ours.flush()
            os.dup2(ours.fileno(), 1)
