"""Deltas are decoded while they arrive; nothing of one is used unless all of it came, nor put onto anything but its base."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from one_link import receive_session
from waiting import HANG_S, wait_until

from weightlane.ckpt_engines import Bucket, ClosedError, CommitError, Deadline, DeadlineExceededError, WeightlaneError
from weightlane.ckpt_engines.runtime.devices import HOST, runtime_of
from weightlane.sync import Expectation, ExpectedTensor, IncomingDelta, Manifest, Rendezvous, Subscriber, TensorSpec
from weightlane.sync.codecs.delta.format import encode
from weightlane.sync.codecs.delta.format.encoder import Encoded
from weightlane.sync.codecs.delta.staged_delta import DeltaDecoding, StagedDelta
from weightlane.sync.control.messages import COORDINATOR, Failed, Message, Open, Staged
from weightlane.sync.receive.staging import Staging
from weightlane.sync.version.box import Box
from weightlane.sync.version.bucket_checksums import checksum_of
from weightlane.sync.version.manifest_message import DeltaSegment

SPECS = tuple(TensorSpec(name, (8,), torch.float32) for name in "abc")
BASE = Manifest(1, SPECS, 64, identity="t/1")


def delta_of(parts: list[torch.Tensor], version: int = 2) -> Manifest:
    """Return the manifest of a delta on `BASE` that has one of `parts` for each tensor; every bucket is 64 bytes."""
    return replace(
        BASE,
        version=version,
        codec="delta",
        base_version=1,
        base_identity="t/1",
        identity=f"t/{version}",
        segments=tuple(DeltaSegment(number, Box((0,), (8,)), part.numel()) for number, part in enumerate(parts)),
    )


def parts_to(filled: float) -> list[torch.Tensor]:
    """Encode the deltas that turn tensors of ones into tensors of `filled`."""
    parts = []
    for _ in SPECS:
        part = encode(torch.ones(8), torch.full((8,), filled))
        assert isinstance(part, Encoded)
        parts.append(part.to_bytes())
    return parts


def stage(staging: Staging, manifest: Manifest, filled: float) -> None:
    """`manifest` was received, with every element `filled`."""
    staging.reserve(manifest)
    staging.memory(manifest).view(torch.float32).fill_(filled)
    staging.complete(manifest)


class Line:
    """A link: a bucket arrives when it is let through, and nothing does once it is cut."""

    def __init__(self, wire: torch.Tensor, manifest: Manifest) -> None:
        self.wire, self.manifest = wire, manifest
        self.passed: queue.SimpleQueue[WeightlaneError | None] = queue.SimpleQueue()
        self.posted: queue.SimpleQueue[Bucket] = queue.SimpleQueue()
        self.checksums = [checksum_of(wire[slice(*manifest.window(index))]) for index in range(manifest.bucket_count)]

    def let_through(self, buckets: int) -> None:
        for _ in range(buckets):
            self.passed.put(None)

    def cut(self) -> None:
        self.passed.put(ClosedError("closed.", part="a test"))

    def announced(self, _sender: str) -> bool:
        return False

    def post(self, bucket: Bucket, _sender: str, _deadline: Deadline) -> str:
        self.posted.put(bucket)
        return self.checksums[bucket.index]

    def flush(self, deadline: Deadline, pending: int) -> None:
        while self.posted.qsize() > pending:
            if (error := self.passed.get(timeout=deadline.remaining_s)) is not None:
                raise error
            bucket = self.posted.get()
            bucket.data.copy_(self.wire[slice(*self.manifest.window(bucket.index))])


class Rollout:
    """A subscriber that serves version 1, whose tensors are ones, and what it says to the coordinator."""

    def __init__(self, rendezvous: Rendezvous, subscriber: Subscriber, *, scatters: bool) -> None:
        self.subscriber = subscriber
        self.rendezvous = rendezvous
        rendezvous.listen(COORDINATOR)
        self.seen: queue.SimpleQueue[str] = queue.SimpleQueue()
        stage(subscriber._staging, BASE, 1.0)
        subscriber._staging.note_staged(BASE)
        subscriber._committed(1)
        if scatters:
            subscriber.prepare_delta = self.prepare

    def prepare(self, delta: IncomingDelta) -> StagedDelta:
        patches = []
        for segment, patch in delta.patches:
            patches.append((segment, patch))
            self.seen.put(delta.manifest.specs[segment.tensor].name)
        return StagedDelta(delta.manifest, tuple(patches))

    def offer(self, line: Line) -> None:
        manifest = line.manifest
        self.subscriber._receive_session = receive_session(BASE, line, name="")
        times = {"deadline_s": HANG_S, "stall_s": HANG_S}
        self.subscriber._dispatch(Open(session="", version=manifest.version, manifest=manifest.to_offer(), **times))

    def hears(self, kind: type[Message]) -> Any:
        while not isinstance(message := self.rendezvous.receive(Deadline.after(HANG_S)), kind):
            assert message is not None
            assert not isinstance(message, Failed | Staged), message
        return message

    def nothing_is_staged(self, version: int) -> None:
        assert self.subscriber.take_delta(version) is None
        with pytest.raises(CommitError):
            self.subscriber.take(version)


@pytest.fixture
def subscriber(rendezvous: Rendezvous, socket_dir: Any) -> Iterator[Subscriber]:
    expectation = Expectation({spec.name: ExpectedTensor(spec.shape, frozenset({spec.dtype})) for spec in SPECS})
    made = Subscriber("r/0", rendezvous.address, "shm", {"socket_dir": str(socket_dir)}, expectation)
    yield made
    made.close()


@pytest.fixture(params=[False, True], ids=["copies", "scatters"])
def rollout(request: pytest.FixtureRequest, rendezvous: Rendezvous, subscriber: Subscriber) -> Rollout:
    return Rollout(rendezvous, subscriber, scatters=request.param)


def line_of(parts: list[torch.Tensor], version: int = 2) -> Line:
    return Line(torch.cat(parts), delta_of(parts, version))


def begun(rollout: Rollout, line: Line) -> None:
    """All but the last bucket has arrived, and where one can look, the first tensors were decoded."""
    rollout.offer(line)
    line.let_through(line.manifest.bucket_count - 1)
    if rollout.subscriber.prepare_delta is not None:
        assert [rollout.seen.get(timeout=HANG_S) for _ in range(2)] == ["a", "b"], "nothing is decoded before the end"


def nothing_is_decoded() -> bool:
    return all(thread.name != "weightlane-decode-r/0" for thread in threading.enumerate())


def goes_on(rollout: Rollout) -> None:
    """The next delta to what serves arrives."""
    line = line_of(parts_to(3.0), version=3)
    rollout.offer(line)
    line.let_through(line.manifest.bucket_count)
    rollout.hears(Staged)
    if (delta := rollout.subscriber.take_delta(3)) is not None:
        tensors: Mapping[str, torch.Tensor] = {spec.name: torch.ones(8) for spec in SPECS}
        delta.swap(tensors)
    else:
        tensors = rollout.subscriber.take(3)
    assert all(tensor.eq(3.0).all() for tensor in tensors.values())


def test_a_connection_that_ends_in_the_middle_leaves_nothing_behind(rollout: Rollout) -> None:
    line = line_of(parts_to(2.0))
    begun(rollout, line)
    line.cut()
    rollout.subscriber._aborted(2)
    rollout.nothing_is_staged(2)
    wait_until(nothing_is_decoded, "end of the thread that decodes, which waits for what will never come")
    goes_on(rollout)


@pytest.mark.parametrize(
    ("says", "kind"), [("changed bytes", "CorruptBucketError"), ("the delta of c", "ProtocolError")]
)
def test_a_last_bucket_that_was_changed_or_is_no_delta_spoils_all_that_was_decoded(
    rollout: Rollout, says: str, kind: str
) -> None:
    parts = parts_to(2.0)
    if kind == "ProtocolError":
        parts[2][0] ^= 1
    line = line_of(parts)
    begun(rollout, line)
    if kind == "CorruptBucketError":
        line.wire[-1] ^= 1
    line.let_through(1)
    failed = rollout.hears(Failed).error
    assert failed["type"] == kind
    assert says in failed["message"]
    rollout.nothing_is_staged(2)
    goes_on(rollout)


def test_a_delta_to_another_base_is_refused_before_its_first_byte(rollout: Rollout) -> None:
    line = line_of(parts_to(2.0))
    line.manifest = replace(line.manifest, base_identity="another trainer's/1")
    with pytest.raises(WeightlaneError, match="is a delta to version 1"):
        rollout.offer(line)
    rollout.nothing_is_staged(2)
    goes_on(rollout)


def test_a_delta_whose_decoding_does_not_end_is_given_up_and_no_more_is_received_meanwhile() -> None:
    parts, over = parts_to(2.0), threading.Event()
    late = Deadline.after(0.05)
    decoding = DeltaDecoding(delta_of(parts), lambda _: over.wait(HANG_S), late, "r/0", runtime_of(HOST))
    decoding.arrived(0, parts[0])
    for waits in (lambda: decoding.arrived(1, parts[1]), decoding.result):
        with pytest.raises(DeadlineExceededError, match="the delta of version 2 to be decoded"):
            waits()
    over.set()


# -- in an order that nobody planned --------------------------------------------------------------------------------------


def test_a_delta_that_stops_half_way_leaves_no_base(monkeypatch: pytest.MonkeyPatch) -> None:
    staging = Staging("r/0", 0, torch.device("cpu"))
    stage(staging, BASE, 1.0)
    staging.commit(1)
    parts = parts_to(2.0)
    delta = StagedDelta.of(IncomingDelta(delta_of(parts), iter(parts).__next__))
    patch_type = type(delta.patches[0][1])
    swap, swapped = patch_type.flip_, []

    def fails(patch: Any, target: torch.Tensor) -> None:
        if swapped:
            raise MemoryError
        swapped.append(swap(patch, target))

    monkeypatch.setattr(patch_type, "flip_", fails)
    with pytest.raises(MemoryError):
        staging.apply(delta)
    monkeypatch.undo()
    assert staging.kept_identity("") == "", "the next delta would be applied to a mixture"
    with pytest.raises(CommitError):
        staging.take_previous(2)


def test_a_delta_of_an_attempt_or_a_session_that_is_over_is_not_taken_for_what_came_after(rollout: Rollout) -> None:
    line = line_of(parts_to(2.0))
    for number in range(2):
        rollout.offer(line)
        line.let_through(line.manifest.bucket_count)
        rollout.hears(Staged)
        if number:
            rollout.subscriber._close_links()
        else:  # a trainer that was started anew offers other weights under the same number
            other = Line(torch.zeros(BASE.total_bytes, dtype=torch.uint8), replace(BASE, version=2, identity="b/2"))
            rollout.offer(other)
            other.cut()
        rollout.nothing_is_staged(2)
