"""Gives a member of a run whose rendezvous this process hosts."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from weightlane.sync import Rendezvous


@pytest.fixture
def member(rendezvous: Rendezvous) -> Iterator[Rendezvous]:
    joined = Rendezvous.join(rendezvous.address)
    yield joined
    joined.close()
