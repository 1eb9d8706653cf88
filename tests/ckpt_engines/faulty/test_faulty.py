"""The fault-injection wrapper: each fault does what its name says, can be repeated, and is counted in a log."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import torch
from recorded_faults import faults_in
from sessions import Session, receive, send, soon
from waiting import HANG_S, NEVER_S, wait_until

from weightlane.ckpt_engines import (
    Bucket,
    CheckpointEngine,
    CheckpointEngineRegistry,
    ClosedError,
    Deadline,
    DeadlineExceededError,
    PeerLostError,
    ProtocolError,
    ReceiverLink,
    SenderLink,
    StorageError,
    Topology,
    VersionFiles,
)
from weightlane.ckpt_engines.faulty.faults import NO_BUCKET, FaultKind, FaultRecord
from weightlane.ckpt_engines.faulty.faulty_links import FaultyReceiverLink, FaultySenderLink
from weightlane.ckpt_engines.runtime.devices import HOST

SIZE = 4096
Pair = Callable[..., Session]
"""Makes a connected sender and receiver. `sender` and `receiver` are options of the wrapper around each; none is no wrapper."""
on_either_side = pytest.mark.parametrize("side", ["sender", "receiver"])


@pytest.fixture
def log(tmp_path: Path) -> str:
    return str(tmp_path / "log")


@pytest.fixture
def pair() -> Iterator[Pair]:
    made: list[Session] = []

    def engine(options: dict[str, Any] | None) -> CheckpointEngine:
        create = CheckpointEngineRegistry().create
        return create("faulty:shm", options) if options else create("shm")

    def pair(
        sender: dict[str, Any] | None = None, receiver: dict[str, Any] | None = None, *, connect: bool = True
    ) -> Session:
        made.append(Session(engine(sender), "r", of_receivers=engine(receiver), connect=connect))
        return made[-1]

    yield pair
    for one in made:
        one.close()


def always(kind: FaultKind, **options: Any) -> dict[str, Any]:
    """Options under which the first bucket of a version meets `kind`."""
    return {"kinds": [kind], "rate": 1, **options}


def half_of(session: Session, side: str) -> Any:
    return session.sender if side == "sender" else session.receiver


def payloads(count: int = 3) -> list[torch.Tensor]:
    return [torch.randint(0, 256, (SIZE,), dtype=torch.uint8) for _ in range(count)]


def changed_bits(one: torch.Tensor, other: torch.Tensor) -> int:
    return sum(int(byte).bit_count() for byte in (one ^ other).tolist())


def note_waits(half: Any, monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Instead of waiting, a half's faults note for how long they would."""
    waits: list[float] = []
    monkeypatch.setattr(half._faults._closed, "wait", waits.append)
    return waits


def carry(
    session: Session, buckets: list[torch.Tensor], deadline_s: float = HANG_S
) -> tuple[Future[None], Future[list[torch.Tensor]]]:
    """Send `buckets` as version 1; a side closes as soon as it fails, as the framework would do."""
    deadline = Deadline.after(deadline_s)

    def send_all() -> None:
        try:
            for index, data in enumerate(buckets):
                send(session.sender, Bucket(1, index, data), ["r"], deadline)
        except BaseException:
            session.sender.close()
            raise

    def receive_all() -> list[torch.Tensor]:
        received = []
        try:
            for index, data in enumerate(buckets):
                received.append(torch.zeros_like(data))
                receive(session.receiver, Bucket(1, index, received[-1]), "s", deadline)
        except BaseException:
            session.receiver.close()
            raise
        return received

    return session.threads.submit(send_all), session.threads.submit(receive_all)


def test_the_wrapper_of_an_engine_declares_what_the_engine_declares() -> None:
    registry = CheckpointEngineRegistry()
    for name in ("shm", "filesystem", "hccl"):
        inner, wrapper = registry.engine_class(name), registry.engine_class(f"faulty:{name}")
        assert (wrapper.capabilities, wrapper.api_version) == (inner.capabilities, inner.api_version)
        assert wrapper.unavailable_reason() == inner.unavailable_reason()
        assert wrapper is registry.engine_class(f"faulty:{name}")
        assert wrapper.config_type.model_fields["inner"].annotation is inner.config_type


def test_every_call_that_can_go_wrong_is_wrapped() -> None:
    pairs = ((FaultySenderLink, SenderLink), (FaultyReceiverLink, ReceiverLink))
    as_it_is = {"address", "announced", "views_are_copied_to", "open_version", "commit_version"}
    for wrapper, contract in pairs:
        functions = inspect.getmembers(contract, inspect.isfunction)
        methods = {name for name, _ in functions if not name.startswith("_")}
        assert methods - as_it_is <= set(vars(wrapper))


NOTHING = type(None)
WHAT_IT_NOTICES = (NOTHING, ProtocolError, PeerLostError)
WHAT_FOLLOWS_FROM_A_HANG = (NOTHING, DeadlineExceededError, PeerLostError)


@pytest.mark.parametrize(
    ("side", "kind", "sender_raises", "receiver_raises"),
    [
        ("sender", FaultKind.DROP, WHAT_IT_NOTICES, ProtocolError),
        ("sender", FaultKind.DUPLICATE, WHAT_IT_NOTICES, ProtocolError),
        ("sender", FaultKind.REORDER, WHAT_IT_NOTICES, ProtocolError),
        ("sender", FaultKind.TRUNCATE, WHAT_IT_NOTICES, ProtocolError),
        ("sender", FaultKind.HANG, DeadlineExceededError, WHAT_FOLLOWS_FROM_A_HANG),
        ("receiver", FaultKind.HANG, WHAT_FOLLOWS_FROM_A_HANG, DeadlineExceededError),
        ("sender", FaultKind.LOSE, PeerLostError, PeerLostError),
        ("receiver", FaultKind.LOSE, PeerLostError, PeerLostError),
        ("receiver", FaultKind.STORAGE, WHAT_IT_NOTICES, StorageError),
    ],
)
def test_a_fault_is_what_its_name_says_on_both_sides_and_is_logged_once(
    pair: Pair, log: str, side: str, kind: FaultKind, sender_raises: Any, receiver_raises: Any
) -> None:
    deadline_s = 0.3 if kind is FaultKind.HANG else HANG_S
    sending, receiving = carry(pair(**{side: always(kind, log=log)}), payloads(), deadline_s)
    assert isinstance(receiving.exception(), receiver_raises)
    assert isinstance(sending.exception(), sender_raises)
    assert [(record.index, record.kind) for record in faults_in(log)] == [(0, kind)]


@on_either_side
def test_a_flipped_bit_is_one_bit_and_never_in_the_senders_own_memory(pair: Pair, side: str) -> None:
    sent = payloads()
    before = [data.clone() for data in sent]
    sending, receiving = carry(pair(**{side: always(FaultKind.FLIP)}), sent)
    received = receiving.result()
    sending.result()
    assert [changed_bits(*both) for both in zip(before, received, strict=True)] == [1, 0, 0]
    assert all(map(torch.equal, before, sent))


@on_either_side
def test_a_delay_costs_its_time_and_nothing_else(pair: Pair, side: str, monkeypatch: pytest.MonkeyPatch) -> None:
    one = pair(**{side: always(FaultKind.DELAY, delay_s=7.5)})
    waits = note_waits(half_of(one, side), monkeypatch)
    sent = [*payloads(), torch.empty(0, dtype=torch.uint8)]
    sending, receiving = carry(one, sent)
    assert all(map(torch.equal, sent, receiving.result()))
    sending.result()
    assert waits == [7.5]


@pytest.mark.parametrize(("side", "kind"), [("sender", FaultKind.HANG), ("receiver", FaultKind.DELAY)])
def test_close_from_another_thread_ends_a_hang_or_a_delay(pair: Pair, side: str, kind: FaultKind, log: str) -> None:
    one = pair(**{side: always(kind, delay_s=NEVER_S, log=log)})
    sending, receiving = carry(one, payloads(), deadline_s=NEVER_S)
    wait_until(lambda: bool(faults_in(log)), "fault")
    half_of(one, side).close()
    with pytest.raises(ClosedError):
        (sending if side == "sender" else receiving).result(HANG_S)
    one.close()  # and with it the other side's wait


def test_a_refused_connection_fails_on_both_sides(pair: Pair, log: str) -> None:
    one = pair(always(FaultKind.REFUSE, log=log), connect=False)
    connecting, dialling = one.start_connect(Deadline.after(0.5))
    with pytest.raises(PeerLostError, match="refused"):
        connecting.result()
    assert isinstance(dialling.exception(), PeerLostError | DeadlineExceededError)
    (record,) = faults_in(log)
    assert record.model_dump(exclude={"at"}) == {
        "half": "s", "session": "session", "version": NO_BUCKET, "index": NO_BUCKET, "kind": FaultKind.REFUSE,
    }  # fmt: skip


def test_a_read_that_fails_raises_in_the_receiver_that_views(pair: Pair) -> None:
    with pytest.raises(StorageError, match="injected"):
        pair(receiver=always(FaultKind.STORAGE)).receiver.view(1, 0, SIZE, "s", soon())


@pytest.mark.parametrize("sides", [(), ("sender",), ("receiver",)], ids=str)
def test_what_is_viewed_is_released_and_reclaimed_and_a_bit_of_it_flips_in_a_private_copy(
    pair: Pair, sides: tuple[str, ...]
) -> None:
    both = pair(**({"sender": {"rate": 0}, "receiver": {"rate": 0}} | dict.fromkeys(sides, always(FaultKind.FLIP))))
    (sent,) = payloads(1)
    data = both.engine.allocate(SIZE, torch.device("cpu")).copy_(sent)
    assert changed_bits(both.show(1, data)[0], sent) == len(sides)
    assert torch.equal(data, sent)
    with pytest.raises(DeadlineExceededError):
        both.sender.reclaim(1, Deadline.after(0.05))
    both.release(1)


@pytest.mark.parametrize("call", ["release", "reclaim"])
def test_what_concerns_a_whole_version_is_delayed_hangs_or_is_lost(
    pair: Pair, call: str, log: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    side = "sender" if call == "reclaim" else "receiver"

    def half(kind: FaultKind) -> Any:
        return half_of(pair(**{side: always(kind, delay_s=7.5, log=log)}), side)

    delayed = half(FaultKind.DELAY)
    waits = note_waits(delayed, monkeypatch)
    getattr(delayed, call)(1, soon())
    assert waits == [7.5]
    with pytest.raises(DeadlineExceededError, match="injected hang"):
        getattr(half(FaultKind.HANG), call)(1, Deadline.after(0.05))
    with pytest.raises(PeerLostError, match="injected"):
        getattr(half(FaultKind.LOSE), call)(1, soon())
    getattr(half(FaultKind.FLIP), call)(1, soon())  # which is about buckets
    records = [(record.version, record.index, record.kind) for record in faults_in(log)]
    assert records == [(1, NO_BUCKET, kind) for kind in (FaultKind.DELAY, FaultKind.HANG, FaultKind.LOSE)]


def test_an_engine_runs_out_of_memory_as_often_as_it_is_told_to(log: str) -> None:
    engine = CheckpointEngineRegistry().create("faulty:shm", {"rate": 0.3, "kinds": ["exhaust"], "log": log})
    failed = []
    for number in range(60):
        try:
            engine.free(engine.allocate(10, torch.device("cpu")))
        except StorageError as error:
            assert "injected" in str(error)  # noqa: PT017
            failed.append(number)
    assert 5 <= len(failed) <= 31  # the seed decides: 18 on average
    records = [(record.half, record.version, record.index, record.kind) for record in faults_in(log)]
    assert records == [("engine", NO_BUCKET, number, FaultKind.EXHAUST) for number in failed]


def test_a_stores_calls_for_a_version_are_passed_on_and_a_postponed_bucket_keeps_its_bytes(tmp_path: Path) -> None:
    options = {"inner": {"path": str(tmp_path)}, **always(FaultKind.REORDER)}
    sender = SenderLink.of(CheckpointEngineRegistry().create("faulty:filesystem", options), "s", HOST)
    sender.connect(Topology("session", {"s": sender.address()}, {}), soon())
    sender.open_version(VersionFiles(7, [b""] * 3, {"about.json": "[7]"}), soon())
    reused = torch.zeros(2, dtype=torch.uint8)
    for index in range(3):
        send(sender, Bucket(7, index, reused.fill_(index), lasting=True), [])
    sender.commit_version(7, {"checksums.json": "7"}, soon())
    sender.close()
    (latest,) = tmp_path.glob("session/*/v7")
    files = {path.name: path.read_bytes() for path in latest.iterdir()}
    assert [files[f"bucket-0000{index}.safetensors"] for index in range(3)] == [b"\0\0", b"\1\1", b"\2\2"]
    assert (files["about.json"], files["checksums.json"]) == (b"[7]", b"7")


def send_much(path: Path, half: str = "s", **options: Any) -> list[FaultRecord]:
    """Faults of 20 versions of 5 buckets, of which one is empty; a store needs no receiver."""
    log = path / f"log-{len(list(path.iterdir()))}"
    options = {"delay_s": 0, "log": str(log), "inner": {"path": str(path / "store")}, **options}
    sender = SenderLink.of(CheckpointEngineRegistry().create("faulty:filesystem", options), half, HOST)
    sender.connect(Topology("session", {half: sender.address()}, {}), soon())
    for version, index in itertools.product(range(20), range(5)):
        send(sender, Bucket(version, index, torch.zeros(0 if index == 1 else 4, dtype=torch.uint8)), [])
    sender.close()
    return faults_in(log)


HARMLESS = ["delay", "flip", "truncate", "duplicate", "drop"]


def test_the_same_seed_injects_the_same_faults_and_a_version_meets_one_of_a_half_at_most(tmp_path: Path) -> None:
    def faults(**options: Any) -> list[tuple[int, int, FaultKind]]:
        records = send_much(tmp_path, kinds=HARMLESS, **options)
        return [(record.version, record.index, record.kind) for record in records]

    first = faults(seed=1, rate=0.1)
    assert first == faults(seed=1, rate=0.1)
    assert first != faults(seed=2, rate=0.1)
    assert first != faults(seed=1, rate=0.1, half="other")
    assert faults(rate=0) == []
    surely = faults(rate=1)
    assert [(version, index) for version, index, _ in surely] == [(version, 0) for version in range(20)]
    assert {kind for _, _, kind in surely} == {FaultKind(kind) for kind in HARMLESS}
    several = faults(rate=0.3)
    assert len({version for version, _, _ in several}) == len(several)
    # Five chances of 0.3 each make 0.83 of a version, 17 of 20 on average; the seed decides.
    assert 11 <= len(several) <= 19
    assert not [kind for _, index, kind in several if index == 1 and kind in {"flip", "truncate"}], "it has no bytes"
