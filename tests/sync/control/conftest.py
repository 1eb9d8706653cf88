"""Gives members of a run whose rendezvous this process hosts, and participants in processes of their own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest
from hop_run import Participant

from weightlane.sync import Rendezvous


@pytest.fixture
def member(rendezvous: Rendezvous) -> Iterator[Rendezvous]:
    joined = Rendezvous.join(rendezvous.address)
    yield joined
    joined.close()


@pytest.fixture
def start() -> Iterator[Callable[..., Participant]]:
    """Start a participant in a process of its own, which ends with the test."""
    with ExitStack() as started:

        def make(*arguments: Any, **more: Any) -> Participant:
            participant = Participant(*arguments, **more)
            started.callback(participant.kill)
            participant.is_ready()
            return participant

        yield make
