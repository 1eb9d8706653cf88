"""Gives the places in which versions are kept."""

from __future__ import annotations

import gc
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from stores import Place, opened
from waiting import HANG_S

from weightlane.ckpt_engines.conformance.checks.base import POOL
from weightlane.ckpt_engines.conformance.processes.pool import Pool
from weightlane.ckpt_engines.runtime.fork_server import ForkServer


@pytest.fixture(autouse=True)
def _halves_are_closed() -> Iterator[None]:
    yield
    while opened:
        opened.pop().close()


@pytest.fixture(autouse=True)
def _closing_takes_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """However busy the machine is, a store is tidy when it has closed."""
    monkeypatch.setattr("weightlane.ckpt_engines.engines.filesystem.sender._CLEANUP_S", HANG_S)


@pytest.fixture(scope="module")
def small_heap() -> Iterator[None]:
    """Collections of garbage, of which some tests start many, pass over everything that is older than the module's tests."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture(scope="session")
def suite_processes(request: pytest.FixtureRequest) -> Pool:
    """The processes of the conformance suite, which have imported torch."""
    stash = request.config.stash
    if POOL not in stash:
        stash[POOL] = Pool()
        request.config.add_cleanup(stash[POOL].close)
    return stash[POOL]


@pytest.fixture(scope="session")
def forks(suite_processes: Pool) -> ForkServer:
    """The fork server of these processes, for programs of a test's own."""
    return suite_processes._server


@pytest.fixture(params=["local", pytest.param("s3", marks=pytest.mark.exhaustive), "memory"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Place:
    """A local disk, a store whose uploads are atomic, and one that renames.

    `make test` leaves out S3 here: a version in parts and the broken stores are tested on S3 in every run.
    """
    if request.param == "s3":
        return Place(request.getfixturevalue("s3_url"), request.getfixturevalue("s3_options"))
    return Place(str(tmp_path / "store") if request.param == "local" else f"memory://{uuid.uuid4().hex}", {})


@pytest.fixture
def mappings() -> Callable[[], list[tuple[str, int]]]:
    """Tells permissions and sizes of the mappings of memory files that the test has made."""

    def lines() -> set[str]:
        gc.collect()  # engines of other tests
        return {line for line in Path("/proc/self/maps").read_text().splitlines() if "memfd:weightlane" in line}

    def made() -> list[tuple[str, int]]:
        found = [line.split()[:2] for line in lines() - earlier]
        bounds = [[int(bound, 16) for bound in place.split("-")] for place, _ in found]
        return sorted((permissions, end - start) for (_, permissions), (start, end) in zip(found, bounds, strict=True))

    earlier = lines()
    return made
