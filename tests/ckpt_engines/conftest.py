"""Makes this folder's helper modules importable, and gives the places in which versions are kept."""

from __future__ import annotations

import sys
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
import sessions
from stores import Place, opened
from waiting import HANG_S


@pytest.fixture(autouse=True)
def _halves_are_closed() -> Iterator[None]:
    yield
    while opened:
        opened.pop().close()


@pytest.fixture(params=["local", "s3", "memory"])
def place(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Place:
    """The same promises on local disks, on a store whose uploads are atomic, and on one that renames."""
    monkeypatch.setattr("weightlane.ckpt_engines.filesystem._CLEANUP_S", HANG_S)
    if request.param == "s3":
        return Place(request.getfixturevalue("s3_url"), request.getfixturevalue("s3_options"))
    return Place(str(tmp_path / "store") if request.param == "local" else f"memory://{uuid.uuid4().hex}", {})


@pytest.fixture
def earlier_mappings() -> None:
    """Set aside what this process maps already; not for every test, because it collects garbage."""
    sessions.earlier_mappings = set(sessions.mapping_lines())
