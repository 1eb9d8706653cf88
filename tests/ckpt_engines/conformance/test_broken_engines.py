"""The conformance suite catches what is wrong with an engine: one broken engine per defect, each by the check made for it."""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from installed import install

from weightlane.ckpt_engines import ConfigError, EngineContractError, EngineImportError, EngineUnavailableError
from weightlane.ckpt_engines.conformance import CheckOutcome, EngineConformance, run_conformance
from weightlane.ckpt_engines.conformance.processes.pool import Pool
from weightlane.ckpt_engines.conformance.processes.resolve import engine_class
from weightlane.ckpt_engines.engines.filesystem.engine import FilesystemEngine

pytestmark = pytest.mark.usefixtures("small_heap")
ENGINES = Path(__file__).with_name("broken_engines.py")
HEALTHY = ("Healthy", "HealthyGloo", "HealthyStore")
LIMITS = {
    "deadline_s": 1.0,
    "interrupted_s": 0.5,
    "expiring_s": 0.3,
    "settle_s": 0.15,
    "slack_s": 0.4,
    "prompt_s": 0.5,
    "grace_s": 0.4,
}
"""Short ones: a broken engine is mostly one that makes everybody wait for them."""
PATIENCE = (1, 6, 36, 200)
"""Factors of these limits, for a machine that is so busy that shorter ones were missed by what is not broken."""
ROUNDS = 12
LEFT = r"(?=.*descriptors)(?=.*listening ports)(?=.*threads)(?=.*child processes)"

# By engine: checks, and a pattern for what each says of it.
DEFECTS: dict[str, dict[str, str]] = {
    # declarations
    "TakesAnyOption": {"options_are_described_and_unknown_or_ill_typed_ones_refused": "the options were accepted"},
    "ClaimsTooMuch": {
        "devices_exist_for_torch_and_the_engine_says_why_it_cannot_run": "'gpu' is not",
        "persistent_buckets_outlive_their_sender": "DeadlineExceededError",
        "a_late_receiver_joins_an_elastic_engine_and_leaves_it": "PeerLostError",
        "an_engine_that_crosses_hosts_holds_a_link_to_the_network": "no link to another host",
    },
    "ClaimsTooLittle": {
        "buckets_of_a_store_that_is_not_persistent_go_with_their_sender": "it returned",
        "a_late_receiver_is_refused_by_an_engine_that_is_not_elastic": "it returned",
    },
    "ClaimsViewsOnOneHost": {
        "halves_implement_what_the_engine_declares": "views=True needs a ViewableSender, GlooSender is none",
        "an_engine_of_one_host_refuses_an_address_of_another_in_words": "PeerLostError",
    },
    "ClaimsADevice": {"buckets_on_every_declared_device_arrive": "not on a CUDA device"},
    "AllocatesOneBufferTwice": {"allocated_buffers_are_what_was_asked_for": "share memory"},
    "AddressIsNoPlainData": {"an_address_is_plain_data": "plain JSON data, it is"},
    "Unpickles": {"nothing_is_unpickled": "unpickled 1 times"},
    "ForgetsOffsets": {
        "buckets_that_make_one_file_are_each_received_and_outlive_their_sender": "holds the bytes of bucket 1"
    },
    # delivery
    "FlipsABit": {
        "every_receiver_gets_every_byte[1]": "is wrong, first in byte 1572864",
        "a_bucket_larger_than_any_socket_buffer_arrives_whole": "is wrong, first in byte 25165824",
    },
    "Reorders": {
        "buckets_come_once_and_in_order": "holds the bytes of bucket",
        "several_buckets_are_under_way_at_a_time[2]": "holds the bytes of bucket",
        "a_slow_receiver_gets_every_bucket": "holds the bytes of bucket",
    },
    "IsBoundToTheThreadThatConnects": {"every_receiver_gets_every_byte[1]": "connections of another thread"},
    "Truncates": {"buckets_of_odd_sizes_arrive_to_their_last_byte": "was not written from byte"},
    "WaitsForEmptyBuckets": {"buckets_of_no_bytes_arrive": "ProtocolError"},
    "KeepsOldVersions": {"versions_follow_each_other_back_to_back": "holds the bytes of bucket 0 of version 1"},
    "FlushesTooEarly": {"memory_may_be_overwritten_as_soon_as_send_returns": "what the sender wrote over its buffer"},
    "OnlyOwnMemory": {"memory_of_the_callers_own_is_delivered_too": "is wrong, first"},
    "ConfusesSenders": {"several_senders_reach_the_same_receivers": "DeadlineExceededError"},
    "ClaimsPointToPoint": {"a_bucket_for_some_receivers_reaches_only_those": "DeadlineExceededError"},
    "HidesPointToPoint": {"a_bucket_for_some_receivers_is_refused_without_point_to_point": "it returned"},
    "SendsToNobody": {"sending_to_somebody_unknown_is_refused": "ProtocolError from .*, it returned"},
    "IgnoresTheVersion": {"a_bucket_other_than_the_one_asked_for_is_refused[version]": "it returned"},
    "LosesTheLastBucket": {"what_was_sent_arrives_though_the_sender_closes_right_after": "PeerLostError"},
    # views
    "ShowsAFlippedBit": {"a_viewed_bucket_shows_the_bytes_that_were_sent[1]": "is wrong, first in byte"},
    "ShowsACache": {
        "buckets_that_adjoin_are_viewed_as_one_storage": "do not adjoin in one storage",
        "memory_is_used_again_once_it_is_reclaimed": "is wrong, first",
        "a_view_outlives_both_halves": "is wrong, first",
    },
    "WipesItsMemory": {
        "memory_outlives_a_connection": "is wrong, first",
        "what_is_viewed_stays_when_its_memory_is_freed": "is wrong, first",
    },
    "ShowsOneCopyForAll": {"lasting_buckets_in_the_callers_own_memory_are_viewed_too": "holds the bytes of bucket"},
    "CopiesByViewing": {"a_receiver_may_copy_what_others_view": "DeadlineExceededError"},
    "ShowsWhatDoesNotLast": {"a_bucket_that_does_not_last_is_not_viewed": "ProtocolError from .*, it returned"},
    "ReclaimsAtOnce": {
        "reclaim_waits_for_the_last_release": "to wait, it returned before .* released the version",
        "releases_and_acknowledgements_of_two_versions_may_cross": "expected DeadlineExceeded.*, it returned",
        "reclaim_fails_in_time_when_a_receiver_was_killed[meanwhile]": "expected PeerLost.*, it returned",
    },
    "KeepsEveryView": {"many_versions_that_were_viewed_leave_nothing_behind": "shared mappings"},
    # deadlines and closing
    "WaitsForItsReaders": {"connect_of_the_sender_ends_by_its_deadline_when_a_receiver_never_comes": "hung"},
    "ReceiverOfAStoreIgnoresDeadlines": {
        "connect_of_a_receiver_ends_by_its_deadline_when_the_sender_never_comes": "hung"
    },
    "SenderIgnoresDeadlines": {
        "send_ends_by_its_deadline_when_a_receiver_does_not_take_the_bucket": "hung",
        "reclaim_ends_by_its_deadline_when_a_receiver_does_not_release": "hung",
    },
    "GlooIgnoresDeadlines": {"receive_ends_by_its_deadline_when_the_sender_freezes_in_mid_bucket": "hung"},
    "AddsATimeoutOfItsOwn": {"receive_ends_by_its_deadline_when_nothing_is_sent": "not before its deadline"},
    "CloseWaitsForCalls": {
        "close_from_another_thread_ends_a_blocked_send": "expected ClosedError from .*, it raised",
        "close_from_another_thread_ends_a_blocked_reclaim_or_view[reclaim]": "expected ClosedError from .*, it raised",
    },
    "CloseOfAStoreWaitsForCalls": {
        "close_from_another_thread_ends_a_blocked_connect[receiver]": "expected ClosedError from .*, it raised",
        "close_from_another_thread_ends_a_blocked_receive": "expected ClosedError from .*, it raised",
    },
    "RaisesOnTheSecondClose": {"a_closed_half_refuses_every_call": "closed already"},
    # deaths
    "HangsInFlushWhenTheSenderDies": {"a_sender_killed_between_buckets_fails_its_receivers_in_time": "hung"},
    "HangsInConnectWhenAPeerDies": {
        "a_receiver_killed_while_connecting_fails_the_sender_in_time": "hung",
        "a_sender_killed_before_connecting_fails_its_receivers_in_time": "hung",
        "a_sender_killed_while_connecting_fails_its_receivers_in_time": "hung",
    },
    "ExitsWithAPeer": {
        "a_receiver_killed_in_mid_bucket_fails_the_sender_in_time": "its process died",
        "a_receiver_killed_between_buckets_fails_the_next_send_in_time": "its process died",
    },
    "TakesHalfABucketForAWhole": {
        "a_sender_killed_in_mid_bucket_fails_its_receivers_in_time": "is wrong, first|was not written from byte"
    },
    "NoticesDeathsAtTheDeadline": {
        "the_death_of_a_peer_is_noticed_long_before_the_deadline[receiver]": "expected PeerLost.* within .* s, it raised"
    },
    "CloseWaitsForThePeer": {"a_peer_killed_before_close_neither_blocks_it_nor_the_next_connection[receiver]": "hung"},
    # strangers
    "LetsAnybodyIn": {
        "a_receiver_without_the_key_is_not_let_in": "it returned",
        "a_receiver_of_another_session_is_not_let_in": "it returned",
    },
    "SendsTheKey": {"the_key_never_goes_over_the_wire": "in hexadecimal"},
    "ListensEverywhere": {"nothing_listens_on_every_interface": r"after address\(\), trainer/0 listens on port"},
    "ServesWhoComesFirst": {
        "strangers_neither_break_nor_delay_connect[silent]": r"\(silent\), it raised DeadlineExceeded",
        "strangers_neither_break_nor_delay_connect[garbage]": r"\(garbage\), it raised ProtocolError",
    },
    # leftovers
    "LeaksWhatAProcessHolds": {"many_connections_leave_nothing_behind": LEFT},
    "LeaksTemporaryFiles": {"many_connections_leave_nothing_behind": "temporary files"},
    "LeaksSharedMemory": {"many_connections_leave_nothing_behind": "no names in /dev/shm"},
    "KeepsAPortFromTheStart": {
        "making_an_engine_and_its_halves_opens_no_port_and_leaves_nothing_behind": "making a half opened 1",
        "closing_a_half_that_never_connected_leaves_nothing_behind": "listening ports",
    },
}


@pytest.fixture(scope="module")
def pool(suite_processes: Pool) -> Pool:
    suite_processes.preload(["broken_data", "broken_conduct"])
    return suite_processes


def options_of(engine: str, store: Path) -> dict[str, str]:
    is_store = issubclass(engine_class(f"{ENGINES}:{engine}"), FilesystemEngine)
    return {"path": str(store)} if is_store else {}


@pytest.fixture(autouse=True)
def _no_name_stays_in_shared_memory() -> Iterator[None]:
    yield
    for path in Path("/dev/shm").glob("broken-engine-*"):
        path.unlink()


@pytest.mark.parametrize("engine", DEFECTS)
def test_a_broken_engine_is_caught_by_the_checks_made_for_it(pool: Pool, tmp_path: Path, engine: str) -> None:
    missed = DEFECTS[engine]
    for patience in PATIENCE:
        limits = {"rounds": ROUNDS, **{limit: patience * seconds for limit, seconds in LIMITS.items()}}
        checks = [f"test_{check}" for check in missed]
        report = run_conformance(
            f"{ENGINES}:{engine}", options_of(engine, tmp_path), checks=checks, pool=pool, limits=limits
        )
        assert sorted(result.name for result in report.checks) == sorted(checks)
        failures = [result.reason for result in report.checks if result.outcome is CheckOutcome.FAILED]
        assert [reason for reason in failures if not reason.startswith("expected ")] == []
        said = {
            result.name.removeprefix("test_"): result.reason
            for result in report.checks
            if result.outcome is CheckOutcome.FAILED
        }
        missed = {
            check: complaint for check, complaint in missed.items() if not re.search(complaint, said.get(check, ""))
        }
        if not missed:
            return
    pytest.fail(f"not said of {engine}: {missed}, but {said}")


def test_every_broken_engine_is_run() -> None:
    healthy = tuple(engine_class(f"{ENGINES}:{name}") for name in HEALTHY)
    module = sys.modules["weightlane_conformance_broken_engines"]  # as the suite loads it
    classes = {name for name, cls in vars(module).items() if inspect.isclass(cls) and issubclass(cls, healthy)}
    assert {*DEFECTS, "RaisesWhenAskedWhetherItCanRun", "GivesAnEmptyReason", *HEALTHY} == classes


CHECKS = {name for name, _ in inspect.getmembers(EngineConformance, inspect.isfunction) if name.startswith("test_")}


def test_every_check_has_a_broken_engine_that_it_catches() -> None:
    assert {f"test_{check.partition('[')[0]}" for checks in DEFECTS.values() for check in checks} == CHECKS


def test_what_is_not_an_engine_or_no_limit_is_refused_with_a_typed_error() -> None:
    with pytest.raises(ConfigError, match="no limit called slack"):
        run_conformance("shm", limits={"slack": 1})
    with pytest.raises(EngineImportError, match="NoSuchEngine"):
        run_conformance(f"{ENGINES}:NoSuchEngine")
    with pytest.raises(EngineUnavailableError, match="availability check failed: RuntimeError: libfabric"):
        run_conformance(f"{ENGINES}:RaisesWhenAskedWhetherItCanRun")
    with pytest.raises(EngineContractError, match="GivesAnEmptyReason returned ''; it must return None"):
        run_conformance(f"{ENGINES}:GivesAnEmptyReason")
    with pytest.raises(EngineContractError, match="not a CheckpointEngine class"):
        run_conformance(f"{ENGINES}:Sender")


def test_a_distribution_says_what_its_engine_cannot_do_and_one_that_can_after_all_is_told(
    pool: Pool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken, check = f"{ENGINES}:AddressIsNoPlainData", "test_an_address_is_plain_data"
    entries = [f"{broken} = third_party:Suite", "shm = third_party:Suite", "gloo = third_party:check"]
    source = (
        "from weightlane.ckpt_engines.conformance import EngineConformance\n"
        f"check = {check!r}\n"
        "class Suite(EngineConformance):\n"
        "    expected_failures = {check: 'its library wants tuples'}\n"
    )
    install(tmp_path, "third_party", source, "\n".join(entries), group="weightlane.conformance")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTEST_ADDOPTS", "--collect-only")  # of the caller's own tests
    report = run_conformance(broken, checks=[check], pool=pool)
    assert [(result.outcome, result.reason) for result in report.checks] == [
        (CheckOutcome.EXPECTED_FAILURE, "its library wants tuples")
    ]
    assert report.passed
    report = run_conformance("shm", checks=[check], pool=pool)
    assert "XPASS(strict)" in report.checks[0].reason
    assert not report.passed
    with pytest.raises(EngineContractError, match="not an EngineConformance class"):
        run_conformance("gloo", checks=[check], pool=pool)
