"""Gives sessions of links around halves that do nothing by themselves."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from link_sessions import Sessions
from links import still_engine
from sessions import Session


@pytest.fixture
def sessions() -> Iterator[Sessions]:
    """Makes sessions, over halves that do nothing unless told otherwise."""
    made: list[Session] = []

    def make(*names: str, engine: Any = None, **more: Any) -> Session:
        made.append(Session(engine or still_engine(), *(names or ("a", "b")), **more))
        return made[-1]

    yield make
    for session in made:
        session.close()
