"""What every engine leaves behind: nothing."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from weightlane.ckpt_engines import CheckpointEngineRegistry


def test_twenty_reconnects_leave_no_descriptor_thread_or_mapping_behind(
    halves: Callable[[int], Any], engine_name: str, engine_options: dict[str, Any]
) -> None:
    connection = halves(2)
    seen = []
    for round_number in range(22):
        connection.sender.call(
            "make", side="sender", engine=engine_name, options=engine_options, name=connection.sender.name
        )
        for half in connection.receivers:
            half.call("make", side="receiver", engine=engine_name, options=engine_options, name=half.name)
        connection.connect()
        connection.deliver([[1, 0, 100_000, round_number], [1, 1, 10, round_number]], allocated=bool(round_number % 2))
        connection.close()
        if round_number in (1, 21):  # the first rounds start what stays, such as torch's own threads
            seen.append([half.call("resources") for half in connection.halves])
    for before, after in zip(*seen, strict=True):
        assert all(after[kind] <= before[kind] for kind in before), (before, after)


def test_closing_a_half_that_never_connected_leaves_nothing_behind(halves: Callable[[int], Any]) -> None:
    connection = halves(1)
    before = connection.sender.call("resources")["descriptors"]
    connection.sender.call("address")
    connection.close()
    assert connection.sender.call("resources")["descriptors"] <= before


def test_nothing_of_a_closed_connection_stays_in_the_file_system(
    connected: Callable[[int], Any], tmp_path: Path
) -> None:
    connection = connected(2)
    connection.deliver([[1, 0, 1000, 1]])
    connection.close()
    assert [path for path in (tmp_path / "store").rglob("*") if path.is_file()] == []


def test_making_an_engine_and_its_halves_opens_no_port_or_file(
    engine_name: str, engine_options: dict[str, Any]
) -> None:
    engine = CheckpointEngineRegistry().create(engine_name, engine_options)
    before = len(list(Path("/proc/self/fd").iterdir()))
    sender, receiver = engine.make_sender("a"), engine.make_receiver("b")
    sender.close()
    receiver.close()
    assert len(list(Path("/proc/self/fd").iterdir())) == before
