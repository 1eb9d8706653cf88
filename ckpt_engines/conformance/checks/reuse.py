"""Checks that a closed engine leaves nothing behind."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from ..processes.payload import Parcel
from ..processes.pool import Pool
from .base import ConformanceBase, ConnectionMaker, grown

_WARM_UP_ROUNDS = 5
"""Rounds after which the counts must stay constant. Before that, libraries may start threads that stay."""
_SHARED_MEMORY = Path("/dev/shm")  # noqa: S108 - only listed


class ReuseChecks(ConformanceBase):
    """Checks of closing and connecting again."""

    def test_many_connections_leave_nothing_behind(self, halves: ConnectionMaker, pool: Pool) -> None:
        """The count of descriptors, ports, threads, processes, mappings, shared memory and temporary files stays constant."""
        rounds = self.rounds
        connection = halves(1)
        seen = _names(_SHARED_MEMORY)
        appeared: list[set[str]] = []
        before: list[dict[str, int]] = []
        for number in range(rounds + _WARM_UP_ROUNDS):
            if number:
                connection.make()
            connection.connect()
            connection.deliver([Parcel(1, 0, 10_000, number), Parcel(1, 1, 10, number)], allocated=bool(number % 2))
            connection.close()
            appeared.append(_names(_SHARED_MEMORY) - seen)
            seen |= appeared[-1]
            if number + 1 == _WARM_UP_ROUNDS:
                before = [half.call("resources") for half in connection.halves]
                files_before = _names(pool.temporary)
        self.no_more_than(before, connection, f"after {rounds} connections")
        assert not (files := _names(pool.temporary) - files_before), (
            f"expected no temporary files, left were {sorted(files)[:5]}"
        )
        # Other programs use shared memory too. They have it mapped, and hardly leave some behind in every second round.
        foreign = _mapped_by_others({half.pid for half in connection.halves})
        left = [names & _names(_SHARED_MEMORY) - foreign for names in appeared]
        leaking = sum(map(bool, left))
        assert leaking < rounds // 2, (
            f"expected no names in {_SHARED_MEMORY}, {leaking} connections left some: {sorted(set().union(*left))[:5]}"
        )

    def test_closing_a_half_that_never_connected_leaves_nothing_behind(self, halves: ConnectionMaker) -> None:
        """Closing frees the port that an address may have opened."""
        connection = halves(1).exchange_addresses()
        connection.close()
        for last in (False, True):  # a resource that a library acquires late and keeps appears once, a leak each time
            before = [half.call("resources") for half in connection.halves]
            connection.make()
            connection.exchange_addresses()
            connection.close()
            try:
                self.no_more_than(before, connection, "after its close")
            except AssertionError:
                if last:
                    raise
            else:
                break

    def test_making_an_engine_and_its_halves_opens_no_port_and_leaves_nothing_behind(
        self, halves: ConnectionMaker, engine_name: str, engine_options: Mapping[str, Any]
    ) -> None:
        """Only ``address`` and ``connect`` open ports."""
        process = halves(1).sender
        counts = process.call("make_and_close", engine=engine_name, options=dict(engine_options))
        opened = counts["during"]["listening ports"] - counts["before"]["listening ports"]
        assert opened <= 0, f"expected no open port before address(), making a half opened {opened}"
        more = grown(counts["before"], counts["after"])
        assert not more, f"expected nothing to be left after close, the process has {more}"


def _mapped_by_others(ours: Collection[int]) -> set[str]:
    """Return the names of shared memory that processes other than `ours` have mapped."""
    found: set[str] = set()
    for process in Path("/proc").glob("[0-9]*"):
        if int(process.name) not in ours:
            with suppress(OSError):  # the process has ended, or is another user's
                lines = (process / "maps").read_text().splitlines()
                found |= {line.rpartition("/")[2] for line in lines if f" {_SHARED_MEMORY}/" in line}
    return found


def _names(directory: Path) -> set[str]:
    return {path.name for path in directory.iterdir()}
