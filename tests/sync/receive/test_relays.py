"""Rollout ranks hand versions on to one another: everybody gets them bit for bit, and a relay that dies harms nobody else."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from direct_hop import MakeHop
from hop import Replica
from hop_run import MakeRun, expected
from one_link import receive_session
from patience import PATIENT
from pydantic import ValidationError
from slices import EVERYTHING, LAYOUTS, TP2
from waiting import NEVER_S

from weightlane.ckpt_engines import (
    Bucket,
    ConfigError,
    CorruptBucketError,
    Deadline,
    DeadlineExceededError,
    ManifestError,
    PeerLostError,
    QuarantinedError,
    WeightlaneError,
    WorkerDiedError,
)
from weightlane.ckpt_engines.runtime.devices import HOST, runtime_of
from weightlane.plugins import RunHooks, hookimpl
from weightlane.sync import Manifest, Outcome, ReplicaState, SyncConfig, TensorSpec
from weightlane.sync.control.coordinator.blame import blame
from weightlane.sync.control.coordinator.replicas import Roster
from weightlane.sync.control.messages import Failed
from weightlane.sync.receive.staging import Staging
from weightlane.sync.receive.version_receiver import StageRequest, VersionReceiver
from weightlane.sync.send.pipeline import Destination
from weightlane.sync.version.bucket_checksums import checksum_of

TOLERANT = PATIENT | {"quorum": 0.5}


class Bytes:
    """Observer: what each participant sent and received, counting a bucket once however many it goes to."""

    def __init__(self) -> None:
        self.sent: Counter[str] = Counter()
        self.received: Counter[str] = Counter()
        self.hooks = RunHooks()
        self.hooks.register(self)

    @hookimpl
    def bucket_sent(self, facts: Mapping[str, Any]) -> None:
        self.sent[facts["participant"]] += facts["nbytes"]

    @hookimpl
    def bucket_received(self, facts: Mapping[str, Any]) -> None:
        self.received[facts["participant"]] += facts["nbytes"]


@pytest.mark.parametrize(("engine", "codec"), [("nixl", "delta"), ("mooncake", "dense")])
def test_down_a_chain_a_trainer_sends_its_bytes_once_and_every_replica_has_them_bit_for_bit(
    hop: MakeHop, engine: str, codec: str
) -> None:
    moved = Bytes()
    run = hop(engine, *LAYOUTS["one rank"], [EVERYTHING] * 3, codec=codec, hooks=moved.hooks, relay="chain")
    for version in (1, 2):
        moved.sent.clear()
        moved.received.clear()
        report = run.serve(version)
        assert report.codec == ("dense" if version == 1 else codec)
        (once,) = set(moved.received.values())
        # Everything sent goes to one receiver: what the relays send is what the trainer does not.
        assert sum(moved.sent.values()) == sum(moved.received.values()) == 3 * once
        assert moved.sent["trainer-0"] == report.sent_bytes == once
        assert sorted(moved.sent.values()) == [once] * 3


def test_lanes_of_slices_that_cross_one_another_on_their_routes_all_arrive(hop: MakeHop) -> None:
    for relay, relaying in (("chain", 2), ("tree", 1)):
        moved = Bytes()
        run = hop("gloo", *LAYOUTS["interleaved"], [*TP2, *TP2], codec="delta", relay=relay, hooks=moved.hooks)
        for version in (1, 2):
            run.serve(version)
        assert len([name for name in moved.sent if name.startswith("rollout")]) >= relaying


def test_a_relay_that_is_killed_is_named_and_the_others_get_the_version_without_it(make_run: MakeRun) -> None:
    run = make_run("gloo", replicas=3, trainer={"relay": "chain"}, sync=TOLERANT)
    run.serve(1)
    run.rank(1).call("die_at", 2)
    run.publish_next(2)
    report = run.sync(2)
    (failure,) = report.failures
    assert failure.excluded == ("rollout-1",)
    assert isinstance(failure.error, PeerLostError)
    assert failure.error.peer == "rollout-1/0"
    committed = {name for name, part in report.replicas.items() if part.outcome is Outcome.COMMITTED}
    assert committed == {"rollout-0", "rollout-2"}
    run.coordinator.participant_lost(WorkerDiedError("killed.", part="test"), "rollout-1")
    run.publish_next(3)
    report = run.sync(3)
    assert report.failures == ()
    assert report.replicas["rollout-1"].outcome is Outcome.LOST
    assert [run.rank(number).call("live_digest") for number in (0, 2)] == [expected(3)] * 2
    states = run.coordinator.states()
    assert {name for name, state in states.items() if state is ReplicaState.SERVING} == committed


@pytest.mark.parametrize(
    ("rollout", "says"),
    [
        ({"shapes": {"head": [40, 24]}}, "head has shape"),
        ({"commit": "in_place"}, 'Set rollout.commit to "staged", or sync.relay to "off".'),
    ],
)
def test_a_replica_that_refuses_and_some_that_join_late_do_not_break_the_chain(
    make_run: MakeRun, rollout: dict[str, Any], says: str
) -> None:
    run = make_run("gloo", trainer={"relay": "chain"}, sync=TOLERANT)
    run.serve(1)
    odd = run.add_replica(**rollout)
    for version in (2, 3):
        run.publish_next(version)
        report = run.sync(version)
        assert isinstance(report.replicas[odd.name].error, ManifestError)
        assert says in str(report.replicas[odd.name].error)
        assert len(report.failures) == (version == 2), "asked once"
    run.coordinator.remove(odd.name)
    late = [run.add_replica(), run.add_replica()]
    # The first one in the chain of all has the version already.
    assert run.outcomes(3) == {replica.name: "committed" for replica in late}
    run.publish_next(4)
    assert run.outcomes(4) == {replica.name: "committed" for replica in [run.replicas[0], *late]}
    assert [run.rank(number).call("live_digest") for number in (0, 2, 3)] == [expected(4)] * 3


def test_settings_that_could_not_hold_are_refused_before_anything_starts(hop: MakeHop) -> None:
    for settings, says in (
        ({"relay": "tree"}, "receivers of shm cannot relay"),
        ({"commit": "in-place"}, "commit is 'in-place', and can be 'staged' or 'in_place'"),
    ):
        with pytest.raises(ConfigError, match=says):
            hop("shm", *LAYOUTS["one rank"], [EVERYTHING], **settings)
    wrong = {"relay": "Tree", "integrity": "on", "codec": "sparse", "full_every": 0, "quantise": "FP8", "relays": "off"}
    for name, value in wrong.items():  # a misspelt value, or name, would turn its setting off
        with pytest.raises(ValidationError, match=rf"(?s)1 validation error .*\n{name}\n"):
            SyncConfig(**{name: value})


def test_a_bucket_is_handed_on_once_it_was_verified() -> None:
    sent = torch.arange(64, dtype=torch.uint8)
    handed_on: list[bytes] = []

    class Carrier:
        """The link that brings the bucket, and the one that hands it on."""

        damage = 0

        def announced(self, _sender: str) -> bool:
            return True

        def post(self, bucket: Bucket, peer: str | list[str], _deadline: Deadline, checksum: str = "") -> str:
            if peer == ["r2/0"]:
                assert checksum == checksum_of(sent)
                handed_on.append(bytes(bucket.data.tolist()))
            else:
                bucket.data.copy_(sent ^ self.damage)
            return checksum_of(sent)

        def flush(self, _deadline: Deadline, _pending: int) -> None:
            pass

    carrier: Any = Carrier()
    manifest = Manifest(3, (TensorSpec("t", (64,), torch.uint8),), 64, checksummed=True)
    receiving = receive_session(manifest, carrier)
    receiving.relayed = [{0: Destination(carrier, ["r2/0"])}]
    request = StageRequest(manifest, manifest, receiving, Deadline.after(NEVER_S), NEVER_S)
    staging = Staging("r1/0", 0, HOST)
    receiver = VersionReceiver("r1/0", HOST, runtime_of(HOST), staging, RunHooks())
    carrier.damage = 1
    with pytest.raises(CorruptBucketError):
        receiver.receive(request)
    assert handed_on == []
    carrier.damage = 0
    receiver.receive(request)
    assert handed_on == [bytes(range(64))]


# -- who is at fault ------------------------------------------------------------------------------------------------------


def lost(peer: str) -> WeightlaneError:
    return PeerLostError("hung up.", part="gloo receiver", peer=peer)


def starved(peer: str) -> WeightlaneError:
    return DeadlineExceededError("no bucket.", part="gloo receiver", peer=peer)


CHANGED = CorruptBucketError("changed bytes.", part="bucket check", peer="r1/0")


@pytest.mark.parametrize(
    ("told", "culprits", "peer"),
    [
        # r1 is dead: whoever is next to it says so, on either side.
        ([("r2/0", lost("r1/0"))], {"r1"}, "r1/0"),
        ([("r2/0", lost("r1/0")), ("t0", lost("r1/0"))], {"r1"}, "r1/0"),
        # Those who starve are named by those behind them, and are not at fault.
        ([("r3/0", starved("r2/0")), ("r2/0", starved("r1/0"))], {"r1"}, "r1/0"),
        ([("r3/0", starved("r2/0")), ("r2/0", starved("r1/0")), ("r1/0", lost("t0"))], set(), "t0"),
        # Two that accuse each other: a sender speaks before its receiver does.
        ([("r1/0", starved("r2/0")), ("r2/0", starved("r1/0"))], {"r2"}, "r2/0"),
        # A bad bucket is its receiver's, as long as nobody else has it: the relay has verified it.
        ([("r2/0", CHANGED), ("r2/0", QuarantinedError("a mixture.", peer="r1/0"))], {"r2"}, "r1/0"),
        ([("r3/0", starved("r2/0")), ("r2/0", starved("r1/0")), ("r2/0", CHANGED)], {"r2"}, "r2/0"),
    ],
)
def test_the_participant_at_the_end_of_a_chain_of_accusations_is_at_fault(
    told: list[tuple[str, WeightlaneError]], culprits: set[str], peer: str
) -> None:
    roster = Roster(["t0"], [Replica(f"r{number}", dict.fromkeys([f"r{number}/0"])) for number in range(4)], 0.5)
    roster.note_joined("t0", "t0#1")
    verdict = blame([Failed(name=name, session="s", version=1, error=error.to_wire()) for name, error in told], roster)
    assert verdict.culprits == culprits
    assert verdict.error.peer == peer
    assert not verdict.final
