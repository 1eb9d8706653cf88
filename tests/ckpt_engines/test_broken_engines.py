"""The conformance suite catches what is wrong with an engine: one broken engine per defect, each by the check made for it."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from weightlane.ckpt_engines import ConfigError, EngineContractError, EngineImportError, EngineUnavailableError
from weightlane.ckpt_engines.conformance import CheckResult, EngineConformance, Outcome, run_conformance
from weightlane.ckpt_engines.conformance.pool import Pool
from weightlane.ckpt_engines.conformance.resolve import engine_class

ENGINES = Path(__file__).with_name("broken_engines.py")
HEALTHY = ("Healthy", "HealthyGloo", "HealthyStore")
ROUNDS = {"rounds": 12}
LIMITS = {"deadline_s": 2.0, "interrupted_s": 1.0, "slack_s": 0.6, "prompt_s": 1.0, "grace_s": 2.0, **ROUNDS}
"""Short ones: a broken engine is mostly one that makes everybody wait for them."""

# engine, check, and what the check says of it
DEFECTS = [
    ("HidesPersistence", "test_buckets_of_a_store_that_is_not_persistent_go_with_their_sender", "did not raise"),
    (
        "ForgetsOffsets",
        "test_buckets_that_make_one_file_are_each_received_and_outlive_their_sender",
        "holds the bytes of bucket 1",
    ),
    (
        "ReceiveOverGlooIgnoresDeadline",
        "test_receive_ends_by_its_deadline_when_the_sender_freezes_in_mid_bucket",
        "hung",
    ),
    ("Reorders", "test_buckets_come_once_and_in_order", "holds the bytes of bucket"),
    ("Duplicates", "test_buckets_come_once_and_in_order", "ProtocolError"),
    ("Drops", "test_buckets_come_once_and_in_order", "ProtocolError"),
    ("Truncates", "test_buckets_of_odd_sizes_arrive_to_their_last_byte", "was not written from byte"),
    ("FlipsABit", "test_every_receiver_gets_every_byte[1]", "is wrong, first in byte 1572864"),
    ("KeepsOldVersions", "test_versions_follow_each_other_back_to_back", "holds the bytes of bucket 0 of version 1"),
    (
        "ReturnsTooEarly",
        "test_memory_may_be_overwritten_as_soon_as_send_returns",
        "what the sender wrote over its buffer",
    ),
    ("OverrunsSlowReceivers", "test_a_slow_receiver_gets_every_bucket", "is wrong, first"),
    ("FillsOneSocketBuffer", "test_a_bucket_larger_than_any_socket_buffer_arrives_whole", "was not written from byte"),
    ("WaitsForEmptyBuckets", "test_buckets_of_no_bytes_arrive", "ProtocolError"),
    ("ServesFourReceivers", "test_every_receiver_gets_every_byte[5]", "DeadlineExceededError"),
    ("ConfusesSenders", "test_several_senders_reach_the_same_receivers", "DeadlineExceededError"),
    ("IgnoresTheVersion", "test_a_bucket_other_than_the_one_asked_for_is_refused[version]", "did not raise"),
    ("SendsToNobody", "test_sending_to_somebody_unknown_is_refused", "did not raise ProtocolError"),
    ("OnlyOwnMemory", "test_memory_of_the_callers_own_is_delivered_too", "is wrong, first"),
    ("LosesTheLastBucket", "test_what_was_sent_arrives_though_the_sender_closes_right_after", "PeerLostError"),
    ("HidesPointToPoint", "test_a_bucket_for_some_receivers_is_refused_without_point_to_point", "did not raise"),
    ("ClaimsPointToPoint", "test_a_bucket_for_some_receivers_reaches_only_those", "ProtocolError"),
    ("ClaimsZeroCopy", "test_zero_copy_means_that_send_reads_the_allocated_memory_itself", "send had copied"),
    ("ClaimsPersistence", "test_persistent_buckets_outlive_their_sender", "hung|PeerLost|Deadline"),
    ("ClaimsElasticity", "test_a_late_receiver_joins_an_elastic_engine_and_leaves_it", "PeerLostError"),
    ("HidesElasticity", "test_a_late_receiver_is_refused_by_an_engine_that_is_not_elastic", "did not raise"),
    ("ClaimsToCrossHosts", "test_an_engine_that_crosses_hosts_holds_a_link_to_the_network", "no link to another host"),
    ("ClaimsADevice", "test_buckets_on_every_declared_device_arrive", "not on a CUDA device"),
    ("ClaimsNoDeviceOfTorch", "test_devices_exist_for_torch_and_the_engine_says_why_it_cannot_run", "'gpu' is not"),
    ("AllocatesOneBufferTwice", "test_allocated_buffers_are_what_was_asked_for", "share memory"),
    ("TakesAnyOption", "test_options_are_described_and_unknown_or_ill_typed_ones_refused", "DID NOT RAISE"),
    ("DescribesNoOption", "test_options_are_described_and_unknown_or_ill_typed_ones_refused", "without a description"),
    ("AddressIsNoPlainData", "test_an_address_is_plain_data", "not plain JSON"),
    ("Unpickles", "test_nothing_is_unpickled", "assert"),
    (
        "GivesAnEmptyReason",
        "test_devices_exist_for_torch_and_the_engine_says_why_it_cannot_run",
        "not a reason",
    ),
    (
        "ConnectOfSenderIgnoresDeadline",
        "test_connect_of_the_sender_ends_by_its_deadline_when_a_receiver_never_comes",
        "hung",
    ),
    (
        "ConnectOfReceiverIgnoresDeadline",
        "test_connect_of_a_receiver_ends_by_its_deadline_when_the_sender_never_comes",
        "hung",
    ),
    ("SendIgnoresDeadline", "test_send_ends_by_its_deadline_when_a_receiver_does_not_take_the_bucket", "hung"),
    ("ReceiveIgnoresDeadline", "test_receive_ends_by_its_deadline_when_nothing_is_sent", "hung"),
    ("AddsATimeoutOfItsOwn", "test_receive_ends_by_its_deadline_when_nothing_is_sent", "before its deadline"),
    (
        "BlamesNobody",
        "test_send_ends_by_its_deadline_when_a_receiver_does_not_take_the_bucket",
        "does not name rollout-1/tp0",
    ),
    ("LetsAnybodyIn", "test_a_receiver_of_another_session_is_not_let_in", "did not raise"),
    ("CloseWaitsForCalls", "test_close_from_another_thread_ends_a_blocked_connect[sender]", "instead of ClosedError"),
    ("CloseWaitsForCalls", "test_close_from_another_thread_ends_a_blocked_send", "instead of ClosedError"),
    ("CloseWaitsForCalls", "test_close_from_another_thread_ends_a_blocked_receive", "instead of ClosedError"),
    ("SaysLostWhenClosed", "test_close_from_another_thread_ends_a_blocked_receive", "raised PeerLostError"),
    ("ReopensWhenClosed", "test_a_closed_half_refuses_every_call", "did not raise ClosedError"),
    ("IgnoresDeadReceivers", "test_a_receiver_killed_between_buckets_fails_the_next_send_in_time", "did not raise"),
    ("HangsInSendWhenAReceiverDies", "test_a_receiver_killed_in_mid_bucket_fails_the_sender_in_time", "hung"),
    ("HangsInSendWhenAReceiverDies", "test_a_receiver_killed_between_buckets_fails_the_next_send_in_time", "hung"),
    ("HangsInReceiveWhenTheSenderDies", "test_a_sender_killed_in_mid_bucket_fails_its_receivers_in_time", "hung"),
    ("HangsInReceiveWhenTheSenderDies", "test_a_sender_killed_between_buckets_fails_its_receivers_in_time", "hung"),
    ("HangsInConnectWhenAReceiverDies", "test_a_receiver_killed_while_connecting_fails_the_sender_in_time", "hung"),
    ("HangsInConnectWhenTheSenderDies", "test_a_sender_killed_while_connecting_fails_its_receivers_in_time", "hung"),
    ("HangsInConnectWhenTheSenderDies", "test_a_sender_killed_before_connecting_fails_its_receivers_in_time", "hung"),
    (
        "TakesHalfABucketForAWhole",
        "test_a_sender_killed_in_mid_bucket_fails_its_receivers_in_time",
        "is wrong, first|was not written from byte",
    ),
    (
        "NoticesDeathsAtTheDeadline",
        "test_the_death_of_a_peer_is_noticed_long_before_the_deadline[receiver]",
        "were allowed",
    ),
    ("RaisesWhatItLikes", "test_the_death_of_a_peer_is_noticed_long_before_the_deadline[sender]", "RuntimeError"),
    ("ExitsTheProcess", "test_a_receiver_killed_in_mid_bucket_fails_the_sender_in_time", "died during send"),
    (
        "CloseWaitsForThePeer",
        "test_a_peer_killed_before_close_neither_blocks_it_nor_the_next_connection[receiver]",
        "hung",
    ),
    ("ShowsAFlippedBit", "test_a_viewed_bucket_shows_the_bytes_that_were_sent[1]", "is wrong, first in byte"),
    ("ShowsToTheFirst", "test_a_viewed_bucket_shows_the_bytes_that_were_sent[3]", "DeadlineExceededError"),
    ("ShowsCopies", "test_buckets_that_adjoin_are_viewed_as_one_storage", "do not adjoin in one storage"),
    (
        "ShowsOneCopyForAll",
        "test_lasting_buckets_in_the_callers_own_memory_are_viewed_too",
        "holds the bytes of bucket",
    ),
    ("CopiesByViewing", "test_a_receiver_may_copy_what_others_view", "DeadlineExceededError"),
    ("ShowsWhatDoesNotLast", "test_a_bucket_that_does_not_last_is_not_viewed", "did not raise ProtocolError"),
    ("ReclaimsAtOnce", "test_reclaim_waits_for_the_last_release", "had released the version"),
    ("ReleasesEverything", "test_releases_and_acknowledgements_of_two_versions_may_cross", "did not raise Deadline"),
    ("ShowsOldVersions", "test_memory_is_used_again_once_it_is_reclaimed", "is wrong, first"),
    ("WipesItsMemoryOnClose", "test_memory_outlives_a_connection", "is wrong, first"),
    ("WipesWhatIsFreed", "test_what_is_viewed_stays_when_its_memory_is_freed", "is wrong, first"),
    ("UnmapsOnClose", "test_a_view_outlives_both_halves", "is wrong, first"),
    (
        "TakesDeathForRelease",
        "test_reclaim_fails_in_time_when_a_receiver_was_killed[meanwhile]",
        "did not raise PeerLost",
    ),
    ("ReclaimIgnoresDeadline", "test_reclaim_ends_by_its_deadline_when_a_receiver_does_not_release", "hung"),
    (
        "CloseWaitsForCalls",
        "test_close_from_another_thread_ends_a_blocked_reclaim_or_view[reclaim]",
        "instead of ClosedError",
    ),
    (
        "CloseWaitsForCalls",
        "test_close_from_another_thread_ends_a_blocked_reclaim_or_view[view]",
        "instead of ClosedError",
    ),
    ("KeepsEveryView", "test_many_versions_that_were_viewed_leave_nothing_behind", "shared mappings"),
    ("LeaksADescriptor", "test_many_connections_leave_nothing_behind", "descriptors"),
    ("LeaksAThread", "test_many_connections_leave_nothing_behind", "threads"),
    ("LeaksAPort", "test_many_connections_leave_nothing_behind", "listening ports"),
    ("LeaksAProcess", "test_many_connections_leave_nothing_behind", "child processes"),
    ("LeaksTemporaryFiles", "test_many_connections_leave_nothing_behind", "temporary files"),
    ("LeaksSharedMemory", "test_many_connections_leave_nothing_behind", "left names in /dev/shm"),
    ("OpensAPortWhenMade", "test_making_an_engine_and_its_halves_opens_no_port_and_leaves_nothing_behind", "port"),
    (
        "KeepsItsPortUnlessConnected",
        "test_closing_a_half_that_never_connected_leaves_nothing_behind",
        "listening ports",
    ),
    ("RaisesOnTheSecondClose", "test_a_closed_half_refuses_every_call", "closed already"),
]


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    made = Pool()
    yield made
    made.close()


@pytest.fixture(scope="module")
def healthy(pool: Pool, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], CheckResult]:
    """The result of a check for the engine that a broken one wraps."""
    results: dict[str, dict[str, CheckResult]] = {}

    def look_up(engine: str, check: str) -> CheckResult:
        base = base_of(engine)
        if base not in results:
            checks = sorted({wanted.partition("[")[0] for other, wanted, _ in DEFECTS if base_of(other) == base})
            options = options_of(engine, tmp_path_factory.mktemp("store"))
            report = run_conformance(f"{ENGINES}:{base}", options, checks=checks, pool=pool, limits=ROUNDS)
            results[base] = {result.name: result for result in report.checks}
        if results[base][check].outcome is Outcome.FAILED:  # as below: once more on a busy machine
            options = options_of(engine, tmp_path_factory.mktemp("store"))
            again = run_conformance(f"{ENGINES}:{base}", options, checks=[check], pool=pool, limits=ROUNDS)
            results[base][check] = again.checks[0]
        return results[base][check]

    return look_up


def base_of(engine: str) -> str:
    """Name of the right engine that a broken one wraps."""
    return next(cls.__name__ for cls in engine_class(f"{ENGINES}:{engine}").__mro__ if cls.__name__ in HEALTHY)


def options_of(engine: str, store: Path) -> dict[str, str]:
    return {"path": str(store)} if base_of(engine) == "HealthyStore" else {}


@pytest.fixture(autouse=True)
def _no_name_stays_in_shared_memory() -> Iterator[None]:
    yield
    for path in Path("/dev/shm").glob("broken-engine-*"):
        path.unlink()


@pytest.mark.parametrize(("engine", "check", "complaint"), DEFECTS, ids=[f"{e}-{c}" for e, c, _ in DEFECTS])
def test_a_broken_engine_is_caught_by_the_check_made_for_it(
    pool: Pool, healthy: Callable[[str, str], CheckResult], tmp_path: Path, engine: str, check: str, complaint: str
) -> None:

    def caught(limits: dict[str, float]) -> CheckResult:
        options = options_of(engine, tmp_path)
        return run_conformance(f"{ENGINES}:{engine}", options, checks=[check], pool=pool, limits=limits).checks[0]

    def as_expected(result: CheckResult) -> bool:
        return result.outcome is Outcome.FAILED and any(text in result.detail for text in complaint.split("|"))

    result = caught(LIMITS)
    if not as_expected(result):  # a busy machine may have missed one of the short limits
        result = caught(ROUNDS)
    assert as_expected(result), result
    same = healthy(engine, check)
    # Some checks are for what an engine declares, and the healthy one declares something else.
    assert same.outcome is Outcome.PASSED or (same.outcome is Outcome.SKIPPED and "declare" in same.reason), same


def test_every_broken_engine_is_run() -> None:
    lines = [line for file in ENGINES.parent.glob("broken_*.py") for line in file.read_text().splitlines()]
    classes = [line.split()[1].partition("(")[0] for line in lines if line.startswith("class ") and "(Healthy" in line]
    assert sorted({engine for engine, _, _ in DEFECTS} | {"RaisesWhenAskedWhetherItCanRun"}) == sorted(classes)


CHECKS = {name for name, _ in inspect.getmembers(EngineConformance, inspect.isfunction) if name.startswith("test_")}


def test_every_check_has_a_broken_engine_that_it_catches() -> None:
    assert {check.partition("[")[0] for _, check, _ in DEFECTS} == CHECKS


def test_the_documentation_lists_every_check_and_no_other() -> None:
    text = (ENGINES.parents[2] / "docs" / "conformance.md").read_text()
    rows = [line.split(" | ")[0] for line in text.splitlines() if line.startswith("| `")]
    assert {f"test_{name}" for row in rows for name in re.findall(r"`(\w+)`", row)} == CHECKS


def test_what_is_not_an_engine_is_refused_with_a_typed_error() -> None:
    with pytest.raises(EngineImportError, match="NoSuchEngine"):
        run_conformance(f"{ENGINES}:NoSuchEngine")
    with pytest.raises(EngineUnavailableError, match="availability check failed: RuntimeError: libfabric"):
        run_conformance(f"{ENGINES}:RaisesWhenAskedWhetherItCanRun")
    with pytest.raises(EngineContractError, match="not a CheckpointEngine class"):
        run_conformance(f"{ENGINES}:Sender")


def test_a_distribution_says_what_its_engine_cannot_do_and_one_that_can_after_all_is_told(
    pool: Pool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken, check = f"{ENGINES}:AddressIsNoPlainData", "test_an_address_is_plain_data"
    metadata = tmp_path / "third_party-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: third-party\nVersion: 1.0\n")
    entries = [f"{broken} = third_party_suite:Suite", "shm = third_party_suite:Suite", "gloo = third_party_suite:check"]
    (metadata / "entry_points.txt").write_text("\n".join(["[weightlane.conformance]", *entries]))
    (tmp_path / "third_party_suite.py").write_text(
        "from weightlane.ckpt_engines.conformance import EngineConformance\n"
        f"check = {check!r}\n"
        "class Suite(EngineConformance):\n"
        "    expected_failures = {check: 'its library wants tuples'}\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    report = run_conformance(broken, checks=[check], pool=pool)
    assert [(result.outcome, result.reason) for result in report.checks] == [
        (Outcome.EXPECTED_FAILURE, "its library wants tuples")
    ]
    assert report.passed
    report = run_conformance("shm", checks=[check], pool=pool)
    assert "XPASS(strict)" in report.checks[0].reason
    assert not report.passed
    with pytest.raises(EngineContractError, match="not an EngineConformance class"):
        run_conformance("gloo", checks=[check], pool=pool)


def test_a_limit_that_does_not_exist_is_refused() -> None:
    with pytest.raises(ConfigError, match="no limit called slack"):
        run_conformance("shm", limits={"slack": 1})
