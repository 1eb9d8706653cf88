"""Prints the command's own output, keeps what other modules print out of it, and shows foreign text unchanged."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from typing import IO, TextIO

from rich.console import Console


def console(file: IO[str] | None = None, *, stderr: bool = False, soft_wrap: bool = True) -> Console:
    """A console that colours what the command marks, and nothing else; ``:X:`` is no picture.

    Square brackets are markup in every text but a `rich.text.Text`: what is not the command's own goes through `escape`.
    """
    return Console(file=file, stderr=stderr, soft_wrap=soft_wrap, highlight=False, emoji=False)


@contextlib.contextmanager
def own_stdout() -> Iterator[TextIO]:
    """Standard output for what the command says; whatever else is printed meanwhile goes to standard error.

    An engine's module may print when it is imported, in Python or, from a library, straight to file descriptor 1: neither may
    end up in the middle of JSON.
    """
    before = sys.stdout
    before.flush()
    diverted = before is not sys.__stdout__
    if diverted:  # by a caller, whose descriptor 1 is none of ours
        with contextlib.redirect_stdout(sys.stderr):
            yield before
        return
    with os.fdopen(os.dup(1), "w", encoding=before.encoding, errors=before.errors) as ours:
        os.dup2(2, 1)
        try:
            yield ours
        finally:
            before.flush()  # what was printed into its buffer, while it still ends in standard error
            ours.flush()
            os.dup2(ours.fileno(), 1)
