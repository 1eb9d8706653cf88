"""What happens in an order that nobody planned: late verdicts, stale offers, closed and crowded ends."""

from __future__ import annotations

import itertools
import queue
import threading
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from typing import Any

import pytest
import torch
from hop_run import MakeRun
from test_delta_versions import after, begun, nudge
from test_lent_versions import SPEC, staged
from waiting import HANG_S, NEVER_S, wait_until

from weightlane.ckpt_engines import (
    CheckpointEngineRegistry,
    ClosedError,
    CommitError,
    Deadline,
)
from weightlane.ckpt_engines.shm import ShmEngine
from weightlane.sync import (
    Expectation,
    ExpectedTensor,
    LocalShard,
    Manifest,
    Publisher,
    Rendezvous,
    Subscriber,
    TensorSpec,
)
from weightlane.sync.boxes import Box
from weightlane.sync.codec_choice import Choice
from weightlane.sync.codecs.delta import encode
from weightlane.sync.correspondence import TroubleError
from weightlane.sync.delta_agreement import DeltaAgreement
from weightlane.sync.delta_encoding import RankDelta
from weightlane.sync.manifest import Segment
from weightlane.sync.messages import Open
from weightlane.sync.progress import Progress
from weightlane.sync.publication import Base, Publication, Slot
from weightlane.sync.receiving import Receiving, Source
from weightlane.sync.staged_delta import IncomingDelta, StagedDelta
from weightlane.sync.staging import Staging

DENSE = Manifest(1, (SPEC,), 64, identity="a/1")


def new_staging() -> Staging:
    return Staging("rollout-0/0", 0, torch.device("cpu"))


def delta_to(new: float, base: Manifest, old: float) -> StagedDelta:
    """What turns `SPEC` full of `old`, in two segments, into the next version, full of `new`."""
    parts = [encode(torch.full((8,), old), torch.full((8,), new)).to_bytes() for _ in range(2)]  # type: ignore[union-attr]
    version = base.version + 1
    manifest = replace(
        base,
        version=version,
        codec="delta",
        base_version=base.version,
        base_identity=base.identity,
        identity=f"a/{version}",
        lasting=False,
        segments=tuple(Segment(0, Box((8 * number,), (8,)), part.numel()) for number, part in enumerate(parts)),
    )
    return StagedDelta.of(IncomingDelta(manifest, iter(parts).__next__))


def keep_dense(staging: Staging, manifest: Manifest, filled: float) -> None:
    """`manifest` was received, and serves."""
    staging.reserve(manifest)
    staging.memory(manifest).view(torch.float32).fill_(filled)
    staging.complete(manifest)
    staging.commit(manifest.version)


def test_a_rollback_never_loads_an_older_version_than_the_one_that_served() -> None:
    staging = new_staging()
    staged(staging, 1)
    staging.commit(1)
    assert staging.settle(1)
    manifest = Manifest(2, (SPEC,), 64, lasting=True, identity="a/2")
    staging.reserve(manifest, lent=True)
    staging.complete(manifest, torch.full((64,), 2, dtype=torch.uint8))
    staging.commit(2)
    assert staging.settle(2, scatters=True), "no copy is kept where deltas go into the live weights"
    staged(staging, 3)
    with pytest.raises(CommitError, match="not kept here"):
        staging.take_previous(3)


def test_a_version_that_serves_is_kept_although_its_sync_for_others_was_given_up() -> None:
    staging = new_staging()
    staged(staging, 1)
    staging.commit(1)
    staging.abort(1)
    assert staging.settle(1)
    staged(staging, 2)
    assert staging.take_previous(2)[0] == 1


def test_a_delta_that_stops_half_way_leaves_no_base(monkeypatch: pytest.MonkeyPatch) -> None:
    staging = new_staging()
    keep_dense(staging, DENSE, 1.0)
    delta = delta_to(2.0, DENSE, 1.0)
    patch_type = type(delta.patches[0][1])
    swap, swapped = patch_type.swap_, []

    def fails(patch: Any, target: torch.Tensor) -> None:
        if swapped:
            raise MemoryError
        swapped.append(swap(patch, target))

    monkeypatch.setattr(patch_type, "swap_", fails)
    with pytest.raises(MemoryError):
        staging.apply(delta)
    monkeypatch.undo()
    assert staging.kept_identity("") == "", "the next delta would be applied to a mixture"
    with pytest.raises(CommitError):
        staging.take_previous(2)


def test_nothing_is_taken_back_into_what_was_forgotten() -> None:
    staging = new_staging()
    keep_dense(staging, DENSE, 1.0)
    staging.apply(delta_to(2.0, DENSE, 1.0))
    staging.forget_kept()
    staging.reserve(replace(DENSE, version=3))
    with pytest.raises(CommitError):
        staging.take(2)


def test_lent_memory_is_given_back_where_there_is_none_for_a_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    staging = new_staging()
    staged(staging, 1)
    staging.commit(1)

    def full(_: int) -> Any:
        raise RuntimeError("can't allocate memory")

    monkeypatch.setattr(staging, "_room", full)
    assert staging.settle(1)
    with pytest.raises(CommitError):
        staging.take_previous(2)


@pytest.fixture
def rendezvous() -> Rendezvous:
    return Rendezvous.host()


@pytest.fixture
def subscriber(rendezvous: Rendezvous, socket_dir: Any) -> Iterator[Subscriber]:
    expectation = Expectation({SPEC.name: ExpectedTensor(SPEC.shape, frozenset({SPEC.dtype}))})
    made = Subscriber("r/0", rendezvous.address, "shm", {"socket_dir": str(socket_dir)}, expectation)
    yield made
    made.close()


class FarAway:
    """A transport through which nothing comes."""

    def __getattr__(self, _: str) -> Any:
        raise ClosedError("closed.", part="a test")


def offered(manifest: Manifest) -> Open:
    return Open(session="", version=manifest.version, manifest=manifest.to_plain(), deadline_s=1.0, stall_s=0.1)


def test_a_delta_of_an_attempt_that_failed_is_not_taken_for_what_came_after(subscriber: Subscriber) -> None:
    subscriber.prepare_delta = StagedDelta.of
    subscriber._delta = (2, delta_to(2.0, DENSE, 1.0))
    subscriber._receiving = Receiving("", FarAway(), (Source(FarAway(), "t-0", ()),))  # type: ignore[arg-type]
    subscriber._handle(offered(replace(DENSE, version=2, identity="b/2")))  # of a trainer that was started anew
    assert subscriber.take_delta(2) is None, "another publication's values would be put into the live weights"


def test_a_delta_that_is_given_up_while_it_is_loaded_is_taken_back_once_it_is_released(
    subscriber: Subscriber,
) -> None:
    staging = subscriber._staging
    keep_dense(staging, DENSE, 1.0)
    staging.apply(delta_to(2.0, DENSE, 1.0))
    subscriber.take(2)
    subscriber._aborted(2)
    subscriber.release(2)
    wait_until(lambda: bool(staging.kept_identity("")), "base for the next delta")
    assert staging.kept_identity("") == "a/1", "the next delta is refused"
    version, tensors = staging.take_previous(2)
    assert (version, float(tensors["w"][0])) == (1, 1.0)


def test_a_delta_does_not_outlive_its_session(subscriber: Subscriber) -> None:
    subscriber._delta = (2, delta_to(2.0, DENSE, 1.0))
    subscriber._close_half()
    assert subscriber.take_delta(2) is None


def test_only_what_was_taken_can_have_been_restored(subscriber: Subscriber) -> None:
    for version in (1, 2):
        manifest = Manifest(version, (SPEC,), 64, identity=f"a/{version}")
        subscriber._staging.reserve(manifest)
        subscriber._staging.memory(manifest)
        subscriber._staging.complete(manifest)
        subscriber._staged_identity = (version, manifest.identity)
        subscriber.take(version)
        subscriber.release(version)
        subscriber._committed(version)
    subscriber.restored()  # of a commit that never began
    assert subscriber._live != "a/1", "a delta to version 1 would be put into version 2"


def test_the_staging_thread_outlives_what_goes_wrong_when_memory_is_given_back(
    subscriber: Subscriber, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: queue.SimpleQueue[int] = queue.SimpleQueue()

    def fails(version: int, **_: Any) -> bool:
        asked.put(version)
        raise RuntimeError("out of memory")

    monkeypatch.setattr(subscriber._staging, "settle", fails)
    for version in (1, 2):  # were the thread gone, nobody would ask for the second one
        subscriber.release(version)
        assert asked.get(timeout=HANG_S) == version


def held_at(version: int) -> Publication:
    held = Publication(version, f"a/{version}", None, Progress("a snapshot", "trainer-0"))
    held.choice, held.delta = Choice("delta", "a test"), RankDelta((), (), 0, 0)
    held.base = Base(version - 1, f"a/{version - 1}", Slot(None))  # type: ignore[arg-type]
    return held


def test_nobody_waits_for_what_another_rank_has_to_say_longer_than_the_version_is_wanted(
    rendezvous: Rendezvous,
) -> None:
    agreement = DeltaAgreement(rendezvous.mailbox("deltas/s"), ["t-0", "t-1"], 0)
    held = held_at(2)
    agreement.say(held)
    threading.Timer(0.1, agreement.close).start()
    with pytest.raises(ClosedError):
        agreement.hear(held, Deadline.after(NEVER_S))
    agreement = DeltaAgreement(rendezvous.mailbox("deltas/s"), ["t-0", "t-1"], 0)
    looks = itertools.count()
    with pytest.raises(ClosedError):
        agreement.hear(held, Deadline.after(NEVER_S), wanted=lambda: next(looks) < 3)


def test_what_the_ranks_said_of_old_versions_does_not_stay_in_the_store(rendezvous: Rendezvous) -> None:
    agreement = DeltaAgreement(rendezvous.mailbox("deltas/s"), ["t-0", "t-1"], 1)
    store = rendezvous.store("")
    keys = []
    for version in range(2, 12):
        agreement.say(held_at(version))
        keys.append(store.num_keys())
    assert keys[-1] == keys[3], "it grows with every version"


def publisher_of(rendezvous: Rendezvous, socket_dir: Any, spec: TensorSpec, **options: Any) -> Publisher:
    engine = CheckpointEngineRegistry().create("shm", {"socket_dir": str(socket_dir), **options})
    shards = [LocalShard.whole(spec, torch.zeros(spec.shape))]
    return Publisher("t-0", rendezvous.address, shards=shards, engine=engine, bucket_bytes=64 << 10, deadline_s=NEVER_S)


def test_the_fence_does_not_wait_for_a_publisher_that_was_closed(rendezvous: Rendezvous, socket_dir: Any) -> None:
    publisher = publisher_of(rendezvous, socket_dir, SPEC)
    publisher._streaming = True  # the version before
    publisher.publish(1)
    threading.Timer(0.1, publisher.close).start()
    with pytest.raises(ClosedError):
        publisher.fence()


def test_other_memory_is_taken_within_the_limit_that_one_snapshot_fills(
    rendezvous: Rendezvous, socket_dir: Any
) -> None:
    with closing(publisher_of(rendezvous, socket_dir, replace(SPEC, shape=(200_000,)), max_shared_mib=1)) as publisher:
        publisher.publish(1)
        publisher.fence()
        assert publisher._held is not None
        assert publisher._held.slot is not None
        publisher._held.slot.exposed.add(("a session that is over", 1))
        publisher.publish(2)
        publisher.fence()  # raised in the training loop, because a receiver had died


class Elsewhere(ShmEngine):
    """Its memory is that of a device."""

    capabilities = replace(ShmEngine.capabilities, devices=frozenset({"meta"}))

    def allocate(self, nbytes: int, device: torch.device) -> torch.Tensor:
        assert device.type == "meta", "memory that it does not have"
        return torch.empty(nbytes, dtype=torch.uint8, device=device)


def test_an_engine_is_asked_for_memory_of_its_devices_only(rendezvous: Rendezvous) -> None:
    engine = Elsewhere(Elsewhere.config_type())
    shards = [LocalShard.whole(SPEC, torch.zeros(16))]
    Publisher("t-0", rendezvous.address, shards=shards, engine=engine, bucket_bytes=64).close()


def test_the_coordinator_does_not_wait_for_a_full_version_that_nobody_holds(make_run: MakeRun) -> None:
    run = begun(make_run, replicas=1)
    connection = run.coordinator._connection
    run.trainers[0].call("nudge", 2, 20)
    run.publish(2)

    def offered() -> bool:
        connection._letters.catch_up()
        return 2 in connection._letters.offers

    wait_until(offered, "offer")
    run.publish_next(3)
    with pytest.raises(TroubleError, match="not held any more"):
        connection._offer_in_full(2, Deadline.after(NEVER_S))


def test_a_newcomer_gets_in_full_what_lies_in_the_store_as_a_delta(make_run: MakeRun) -> None:
    run = begun(make_run, "filesystem", sync={"retries": 0})
    assert nudge(run, 2).codec == "delta"
    run.add_replica()
    report = run.sync(2)
    assert {name: part.outcome.value for name, part in report.replicas.items()} == {"rollout-1": "committed"}
    assert run.live() == [after(0, [2])] * 2
    assert nudge(run, 3).codec == "delta"
    assert run.live() == [after(0, [2, 3])] * 2


def test_deltas_larger_than_every_bucket_of_whole_tensors_are_sent(make_run: MakeRun) -> None:
    run = make_run("filesystem", trainers=2, trainer={"codec": "delta", "bucket_bytes": 4096}, sync={"retries": 0})
    run.publish(1)
    run.sync(1)
    for trainer in run.trainers:
        trainer.call("nudge", 2, 3)
    run.publish(2)
    report = run.sync(2)
    assert report.codec == "delta"
    assert report.replicas["rollout-0"].nbytes > 3936, "of no interest: it fits into the largest bucket"
