"""Chooses the checks of the conformance suite that `make test` runs on each engine. `make test-all` runs all on all."""

from __future__ import annotations

from pathlib import Path

import pytest

_PACKAGES = Path(__file__).parents[3] / "plugins/packages"

PROMISES_OF_EVERY_ENGINE = {
    "every_receiver_gets_every_byte[2]",
    "memory_may_be_overwritten_as_soon_as_send_returns",
    "receive_ends_by_its_deadline_when_nothing_is_sent",
    "close_from_another_thread_ends_a_blocked_receive",
    "a_receiver_killed_in_mid_bucket_fails_the_sender_in_time",
    "a_sender_killed_in_mid_bucket_fails_its_receivers_in_time",
    "closing_a_half_that_never_connected_leaves_nothing_behind",
}
PROMISES_OF_EVERY_PACKAGE = {
    "every_receiver_gets_every_byte[2]",
    "a_receiver_killed_in_mid_bucket_fails_the_sender_in_time",
    "closing_a_half_that_never_connected_leaves_nothing_behind",
}
NEED_AN_ENGINE_THAT_CROSSES_HOSTS = {
    "an_engine_that_crosses_hosts_holds_a_link_to_the_network",
    "receive_ends_by_its_deadline_when_the_sender_freezes_in_mid_bucket",
    "strangers_neither_break_nor_delay_connect[garbage]",
    "the_key_never_goes_over_the_wire",
    "several_senders_reach_the_same_receivers",
}
"""`shm` could show them for memory, Unix sockets or one group of processes only."""
NEED_A_STORE = {
    "persistent_buckets_outlive_their_sender",
    "buckets_that_make_one_file_are_each_received_and_outlive_their_sender",
    "a_late_receiver_joins_an_elastic_engine_and_leaves_it",
    "a_bucket_for_some_receivers_is_refused_without_point_to_point",
    "a_bucket_other_than_the_one_asked_for_is_refused[version]",
}
CHOSEN = {
    "TestGloo": PROMISES_OF_EVERY_ENGINE | NEED_AN_ENGINE_THAT_CROSSES_HOSTS,
    "TestFilesystem": PROMISES_OF_EVERY_ENGINE | NEED_A_STORE,
    **dict.fromkeys(
        ("weightlane-engine-template", "weightlane-mooncake", "weightlane-nixl"), PROMISES_OF_EVERY_PACKAGE
    ),
}
"""Checks by test class, or by package."""
LEFT_OUT = {
    "TestShm": NEED_AN_ENGINE_THAT_CROSSES_HOSTS
    | NEED_A_STORE
    | {
        "strangers_neither_break_nor_delay_connect[silent]",
        "strangers_neither_break_nor_delay_connect[hanging up]",
        "strangers_neither_break_nor_delay_connect[flood]",
        "every_receiver_gets_every_byte[1]",
        "several_buckets_are_under_way_at_a_time[16]",
        "a_viewed_bucket_shows_the_bytes_that_were_sent[1]",
    }
}
"""Checks that are not chosen though all others are: another engine shows them, or they are further rows of one."""


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the checks that are not chosen as exhaustive."""
    for item in items:
        engine, check = _engine_of(item), item.name.removeprefix("test_")
        if check not in CHOSEN.get(engine, {check}) or check in LEFT_OUT.get(engine, ()):
            item.add_marker(pytest.mark.exhaustive)


def _engine_of(item: pytest.Item) -> str:
    """Return the key in `CHOSEN` of a test that is a check of the suite; empty for other tests."""
    if item.path == Path(__file__).with_name("test_conformance.py"):
        return item.cls.__name__ if getattr(item, "cls", None) else ""
    in_package = item.path.name == "test_conformance.py" and item.path.is_relative_to(_PACKAGES)
    return item.path.relative_to(_PACKAGES).parts[0] if in_package else ""
