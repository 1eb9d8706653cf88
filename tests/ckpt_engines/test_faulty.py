"""The fault-injection wrapper: each fault does what its name says, in the contract's own errors, and can be counted."""

from __future__ import annotations

import inspect
import itertools
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from weightlane.ckpt_engines import (
    API_VERSION,
    Bucket,
    Capabilities,
    CheckpointEngine,
    CheckpointEngineRegistry,
    ClosedError,
    ConfigError,
    Deadline,
    DeadlineExceededError,
    Delivery,
    EngineConfig,
    EngineUnavailableError,
    PeerLostError,
    ProtocolError,
    StorageError,
    Topology,
    UnknownEngineError,
    WeightReceiver,
    WeightSender,
)
from weightlane.ckpt_engines.faulty import (
    NO_BUCKET,
    FaultKind,
    FaultRecord,
    FaultyEngine,
    FaultyReceiver,
    FaultySender,
    faulty,
    read_fault_log,
)

SENDER_KINDS = set(FaultKind) - {FaultKind.STORAGE, FaultKind.EXHAUST}
RECEIVER_KINDS = {FaultKind.FLIP, FaultKind.DELAY, FaultKind.HANG, FaultKind.LOSE, FaultKind.STORAGE}
BUILT_IN = ("gloo", "shm", "filesystem")
SIZE = 4096
_sessions = itertools.count()


class NoMailbox:
    """The built-in engines need none."""

    def put(self, key: str, value: Any) -> None:
        raise AssertionError(key)

    def get(self, key: str, deadline: Deadline) -> Any:
        raise AssertionError(key)


class Pair:
    """A sender and a receiver in this process, each driven by a thread of its own."""

    def __init__(self, sender: CheckpointEngine, receiver: CheckpointEngine, session: str = "") -> None:
        self.sender, self.receiver = sender.make_sender("s"), receiver.make_receiver("r")
        session = session or f"pair-{next(_sessions)}"
        self.topology = Topology(session, {"s": self.sender.address()}, {"r": self.receiver.address()})
        self.threads = ThreadPoolExecutor(2)

    def connect(self, deadline_s: float = 5.0) -> tuple[Future[None], Future[None]]:
        deadline = Deadline.after(deadline_s)
        return (
            self.threads.submit(self.sender.connect, self.topology, NoMailbox(), deadline),
            self.threads.submit(self.receiver.connect, self.topology, NoMailbox(), deadline),
        )

    def connected(self) -> Pair:
        for future in self.connect():
            future.result()
        return self

    def carry(
        self, buckets: list[torch.Tensor], deadline_s: float = 5.0
    ) -> tuple[Future[None], Future[list[torch.Tensor]]]:
        """Send `buckets` as version 1; a side closes as soon as it fails, as the framework would do."""
        deadline = Deadline.after(deadline_s)

        def send() -> None:
            try:
                for index, data in enumerate(buckets):
                    self.sender.send(Bucket(1, index, data), ["r"], deadline)
            except BaseException:
                self.sender.close()
                raise

        def receive() -> list[torch.Tensor]:
            received = []
            try:
                for index, data in enumerate(buckets):
                    received.append(torch.zeros_like(data))
                    self.receiver.receive(Bucket(1, index, received[-1]), "s", deadline)
            except BaseException:
                self.receiver.close()
                raise
            return received

        return self.threads.submit(send), self.threads.submit(receive)

    def close(self) -> None:
        self.sender.close()
        self.receiver.close()
        self.threads.shutdown()


@pytest.fixture(params=BUILT_IN)
def engine_name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def make(engine_name: str, tmp_path: Path) -> Callable[..., CheckpointEngine]:
    """Makes the engine, wrapped when options of the wrapper are given."""
    inner = {"path": str(tmp_path / "store")} if engine_name == "filesystem" else {}

    def make(**options: Any) -> CheckpointEngine:
        if not options:
            return CheckpointEngineRegistry().create(engine_name, inner)
        return CheckpointEngineRegistry().create(f"faulty:{engine_name}", {"inner": inner, **options})

    return make


@pytest.fixture
def pair(make: Callable[..., CheckpointEngine]) -> Iterator[Callable[..., Pair]]:
    """Makes a pair of which one side, or both, are wrapped."""
    made: list[Pair] = []

    def pair(sender: dict[str, Any] | None = None, receiver: dict[str, Any] | None = None, session: str = "") -> Pair:
        made.append(Pair(make(**(sender or {})), make(**(receiver or {})), session))
        return made[-1]

    yield pair
    for one in made:
        one.close()


def always(kind: FaultKind, **options: Any) -> dict[str, Any]:
    """Options under which the first bucket of a version meets `kind`."""
    return {"kinds": [kind], "rate": 1, **options}


def payloads(count: int = 3) -> list[torch.Tensor]:
    return [torch.randint(0, 256, (SIZE,), dtype=torch.uint8) for _ in range(count)]


def changed_bits(one: torch.Tensor, other: torch.Tensor) -> int:
    return sum(int(byte).bit_count() for byte in (one ^ other).tolist())


def test_the_wrapper_of_every_engine_declares_what_the_engine_declares() -> None:
    registry = CheckpointEngineRegistry()
    for name in registry.names():
        inner, wrapper = registry.engine_class(name), registry.engine_class(f"faulty:{name}")
        assert (wrapper.capabilities, wrapper.api_version) == (inner.capabilities, inner.api_version)
        assert wrapper.unavailable_reason() == inner.unavailable_reason()
        assert wrapper is registry.engine_class(f"faulty:{name}")
        assert wrapper.config_type.model_fields["inner"].annotation is inner.config_type


def test_wrappers_are_not_listed() -> None:
    registry = CheckpointEngineRegistry()
    registry.engine_class("faulty:shm")
    assert not [name for name in registry.names() if "faulty" in name]
    assert [row.name for row in registry.list()] == registry.names()


@pytest.mark.parametrize("name", ["faulty:", "faulty:nosuch", "faulty:faulty:shm", "faulty"])
def test_a_wrapper_of_something_unknown_is_an_unknown_engine(name: str) -> None:
    with pytest.raises(UnknownEngineError, match="shm"):
        CheckpointEngineRegistry().create(name)


def test_a_wrapper_of_an_engine_that_cannot_run_here_cannot_either(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    with pytest.raises(EngineUnavailableError, match="no CUDA device"):
        CheckpointEngineRegistry().create("faulty:nccl")


@pytest.mark.parametrize(
    ("engine", "options", "said"),
    [
        ("filesystem", {}, "options.inner.path"),
        ("filesystem", {"inner": {"path": "x", "keep_versions": 0}}, "options.inner.keep_versions"),
        ("shm", {"inner": {"nosuch": 1}}, "options.inner.nosuch"),
        ("shm", {"inner": 3}, "options.inner"),
        ("shm", {"socket_dir": "/tmp"}, "options.socket_dir"),
        ("shm", {"rate": 1.5}, "options.rate"),
        ("shm", {"kinds": ["drop", "explode"]}, "options.kinds.1"),
        ("shm", {"kinds": []}, "options.kinds"),
        ("shm", {"delay_s": -1}, "options.delay_s"),
    ],
)
def test_a_bad_option_is_named_wherever_it_stands(engine: str, options: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError) as failure:
        CheckpointEngineRegistry().create(f"faulty:{engine}", options)
    assert f"checkpoint_engine.{said}" in str(failure.value)


def test_every_option_has_a_default_and_a_description() -> None:
    engine = CheckpointEngineRegistry().create("faulty:shm")
    assert all(field.description for field in type(engine.config).model_fields.values())


def test_every_method_of_the_contract_is_wrapped() -> None:
    pairs = ((FaultySender, WeightSender), (FaultyReceiver, WeightReceiver), (FaultyEngine, CheckpointEngine))
    for wrapper, contract in pairs:
        functions = inspect.getmembers(contract, inspect.isfunction)
        methods = {name for name, _ in functions if not name.startswith("_")}
        assert methods <= set(vars(wrapper))


def test_without_faults_every_byte_arrives(pair: Callable[..., Pair]) -> None:
    both = pair({"rate": 0}, {"rate": 0}).connected()
    sent = [*payloads(), torch.empty(0, dtype=torch.uint8)]
    sending, receiving = both.carry(sent)
    assert all(map(torch.equal, sent, receiving.result()))
    sending.result()


@pytest.mark.parametrize("kind", [FaultKind.DROP, FaultKind.DUPLICATE, FaultKind.REORDER, FaultKind.TRUNCATE], ids=str)
def test_a_bucket_that_is_dropped_doubled_swapped_or_cut_is_noticed_where_the_order_matters(
    pair: Callable[..., Pair], engine_name: str, kind: FaultKind, tmp_path: Path
) -> None:
    log = str(tmp_path / "log")
    one = pair(always(kind, log=log)).connected()
    sent = payloads()
    store = engine_name == "filesystem"
    sending, receiving = one.carry(sent, deadline_s=0.5 if store else 5.0)
    if store and kind in {FaultKind.DUPLICATE, FaultKind.REORDER}:  # a store has every bucket under its own name
        sending.result()
        assert all(map(torch.equal, sent, receiving.result()))
    else:
        with pytest.raises(DeadlineExceededError if store and kind is FaultKind.DROP else ProtocolError):
            receiving.result()
        assert sending.exception() is None or isinstance(sending.exception(), ProtocolError | PeerLostError)
    assert [(record.index, record.kind) for record in read_fault_log(log)] == [(0, kind)]


@pytest.mark.parametrize("side", ["sender", "receiver"])
def test_a_flipped_bit_is_one_bit_and_never_in_the_senders_own_memory(pair: Callable[..., Pair], side: str) -> None:
    one = pair(**{side: always(FaultKind.FLIP)}).connected()
    sent = payloads()
    before = [data.clone() for data in sent]
    sending, receiving = one.carry(sent)
    received = receiving.result()
    sending.result()
    assert [changed_bits(*both) for both in zip(before, received, strict=True)] == [1, 0, 0]
    assert all(map(torch.equal, before, sent))


@pytest.mark.parametrize("side", ["sender", "receiver"])
def test_a_delay_costs_its_time_and_nothing_else(pair: Callable[..., Pair], side: str) -> None:
    one = pair(**{side: always(FaultKind.DELAY, delay_s=0.2)}).connected()
    sent = payloads()
    started = time.monotonic()
    sending, receiving = one.carry(sent)
    assert all(map(torch.equal, sent, receiving.result()))
    sending.result()
    assert 0.2 <= time.monotonic() - started < 1.5


@pytest.mark.parametrize("side", ["sender", "receiver"])
def test_a_hang_ends_with_the_deadline(pair: Callable[..., Pair], side: str) -> None:
    one = pair(**{side: always(FaultKind.HANG)}).connected()
    started = time.monotonic()
    sending, receiving = one.carry(payloads(), deadline_s=0.4)
    failures = {"sender": sending.exception(), "receiver": receiving.exception()}
    assert isinstance(failures.pop(side), DeadlineExceededError)
    (other,) = failures.values()
    assert other is None or isinstance(other, DeadlineExceededError | PeerLostError)
    assert 0.3 < time.monotonic() - started < 1.5


@pytest.mark.parametrize("side", ["sender", "receiver"])
@pytest.mark.parametrize("kind", [FaultKind.HANG, FaultKind.DELAY], ids=str)
def test_close_from_another_thread_ends_a_hang_or_a_delay(
    pair: Callable[..., Pair], side: str, kind: FaultKind
) -> None:
    one = pair(**{side: always(kind, delay_s=30)}).connected()
    sending, receiving = one.carry(payloads(), deadline_s=30)
    time.sleep(0.1)
    started = time.monotonic()
    (one.sender if side == "sender" else one.receiver).close()
    with pytest.raises(ClosedError):
        (sending if side == "sender" else receiving).result(timeout=5)
    assert time.monotonic() - started < 1
    one.close()  # and with it the other side's wait


@pytest.mark.parametrize("side", ["sender", "receiver"])
def test_a_lost_peer_is_lost_to_both_sides(pair: Callable[..., Pair], engine_name: str, side: str) -> None:
    one = pair(**{side: always(FaultKind.LOSE)}).connected()
    sending, receiving = one.carry(payloads())
    failures = {"sender": sending.exception(), "receiver": receiving.exception()}
    assert isinstance(failures[side], PeerLostError)
    if (engine_name, side) == ("filesystem", "receiver"):  # nobody waits for the receivers of a store
        assert failures["sender"] is None
    else:
        assert all(isinstance(failure, PeerLostError) for failure in failures.values())


def test_a_refused_connection_fails_on_both_sides(pair: Callable[..., Pair], tmp_path: Path) -> None:
    log = str(tmp_path / "log")
    connecting, dialling = pair(always(FaultKind.REFUSE, log=log), session="refused").connect(deadline_s=1.0)
    with pytest.raises(PeerLostError, match="refused"):
        connecting.result()
    assert isinstance(dialling.exception(), PeerLostError | DeadlineExceededError)
    (record,) = read_fault_log(log)
    assert record.model_dump(exclude={"at"}) == {
        "half": "s", "session": "refused", "version": NO_BUCKET, "index": NO_BUCKET, "kind": FaultKind.REFUSE,
    }  # fmt: skip


def test_a_storage_error_is_one_of_the_receiver(pair: Callable[..., Pair]) -> None:
    both = always(FaultKind.STORAGE)
    one = pair(both, both).connected()
    _, receiving = one.carry(payloads(), deadline_s=2)
    with pytest.raises(StorageError, match="injected"):
        receiving.result()


class Viewed:
    """A pair over shared memory of which the receiver has viewed, or will view, version 1."""

    def __init__(self, pair: Pair, engine: CheckpointEngine) -> None:
        self.pair = pair
        self.data = engine.allocate(SIZE, torch.device("cpu")).copy_(payloads(1)[0])

    def show(self, version: int = 1) -> torch.Tensor:
        deadline = Deadline.after(5)
        bucket = Bucket(version, 0, self.data, lasting=True)
        sending = self.pair.threads.submit(self.pair.sender.send, bucket, ["r"], deadline)
        view = self.pair.receiver.view(version, 0, SIZE, "s", deadline)
        sending.result()
        return view


@pytest.fixture
def shown() -> Iterator[Callable[..., Viewed]]:
    """Makes a connected pair over `faulty:shm`, with other options for either side."""
    made: list[Pair] = []

    def shown(sender: dict[str, Any] | None = None, receiver: dict[str, Any] | None = None) -> Viewed:
        create = CheckpointEngineRegistry().create
        engine = create("faulty:shm", sender or {"rate": 0})
        made.append(Pair(engine, create("faulty:shm", receiver or {"rate": 0})).connected())
        return Viewed(made[-1], engine)

    yield shown
    for pair in made:
        pair.close()


def test_without_faults_what_is_viewed_is_released_and_reclaimed(shown: Callable[..., Viewed]) -> None:
    both = shown()
    view = both.show()
    assert torch.equal(view, both.data)
    with pytest.raises(DeadlineExceededError):
        both.pair.sender.reclaim(1, Deadline.after(0.05))
    both.pair.receiver.release(1, Deadline.after(5))
    both.pair.sender.reclaim(1, Deadline.after(5))


@pytest.mark.parametrize("side", ["sender", "receiver"])
def test_a_bit_of_a_viewed_bucket_flips_in_a_private_copy(shown: Callable[..., Viewed], side: str) -> None:
    both = shown(**{side: always(FaultKind.FLIP)})
    before = both.data.clone()
    assert changed_bits(both.show(), before) == 1
    assert torch.equal(both.data, before)


def test_a_view_that_fails_fails_as_a_receive_does(shown: Callable[..., Viewed]) -> None:
    for kind, error in ((FaultKind.STORAGE, StorageError), (FaultKind.LOSE, PeerLostError)):
        with pytest.raises(error):
            shown(receiver=always(kind)).pair.receiver.view(1, 0, SIZE, "s", Deadline.after(5))


@pytest.mark.parametrize("call", ["release", "reclaim"])
def test_what_concerns_a_whole_version_is_delayed_hangs_or_is_lost(
    shown: Callable[..., Viewed], call: str, tmp_path: Path
) -> None:
    side = "sender" if call == "reclaim" else "receiver"
    log = str(tmp_path / "log")

    def run(kind: FaultKind, deadline_s: float) -> None:
        both = shown(**{side: always(kind, delay_s=0.2, log=log)})
        getattr(getattr(both.pair, side), call)(1, Deadline.after(deadline_s))

    started = time.monotonic()
    run(FaultKind.DELAY, 5)
    assert time.monotonic() - started >= 0.2
    with pytest.raises(DeadlineExceededError, match="injected hang"):
        run(FaultKind.HANG, 0.2)
    with pytest.raises(PeerLostError, match="injected"):
        run(FaultKind.LOSE, 5)
    run(FaultKind.FLIP, 5)  # which is about buckets
    records = [(record.version, record.index, record.kind) for record in read_fault_log(log)]
    assert records == [(1, NO_BUCKET, kind) for kind in (FaultKind.DELAY, FaultKind.HANG, FaultKind.LOSE)]


def test_an_engine_runs_out_of_memory_as_often_as_it_is_told_to(tmp_path: Path) -> None:
    log = str(tmp_path / "log")
    engine = CheckpointEngineRegistry().create("faulty:shm", {"rate": 0.3, "kinds": ["exhaust"], "log": log})
    failed = []
    for number in range(60):
        try:
            engine.free(engine.allocate(10, torch.device("cpu")))
        except StorageError as error:
            assert "injected" in str(error)  # noqa: PT017
            failed.append(number)
    assert 5 <= len(failed) <= 31  # 18, give or take three and a half standard deviations
    records = [(record.half, record.version, record.index, record.kind) for record in read_fault_log(log)]
    assert records == [("engine", NO_BUCKET, number, FaultKind.EXHAUST) for number in failed]


def send_much(path: Path, half: str = "s", **options: Any) -> list[FaultRecord]:
    """Faults of 60 versions of 5 buckets, of which one is empty; a store needs no receiver."""
    log = path / f"log-{len(list(path.iterdir()))}"
    options = {"delay_s": 0, "log": str(log), "inner": {"path": str(path / "store")}, **options}
    sender = CheckpointEngineRegistry().create("faulty:filesystem", options).make_sender(half)
    sender.connect(Topology("session", {half: sender.address()}, {}), NoMailbox(), Deadline.after(5))
    for version, index in itertools.product(range(60), range(5)):
        sender.send(
            Bucket(version, index, torch.zeros(0 if index == 1 else 4, dtype=torch.uint8)), [], Deadline.after(5)
        )
    sender.close()
    return read_fault_log(log)


HARMLESS = ["delay", "flip", "truncate", "duplicate", "drop"]


def test_the_same_seed_injects_the_same_faults_and_another_seed_or_name_others(tmp_path: Path) -> None:
    def faults(**options: Any) -> list[tuple[int, int, FaultKind]]:
        records = send_much(tmp_path, kinds=HARMLESS, **options)
        return [(record.version, record.index, record.kind) for record in records]

    first = faults(seed=1, rate=0.1)
    assert first == faults(seed=1, rate=0.1)
    assert first != faults(seed=2, rate=0.1)
    assert first != faults(seed=1, rate=0.1, half="other")
    assert {kind for _, _, kind in first} == {FaultKind(kind) for kind in HARMLESS}
    assert faults(rate=0) == []


def test_a_version_meets_at_most_one_fault_of_a_half(tmp_path: Path) -> None:
    records = send_much(tmp_path, kinds=HARMLESS, rate=1)
    assert [record.version for record in records] == list(range(60))
    assert {record.index for record in records} == {0}
    records = send_much(tmp_path, kinds=HARMLESS, rate=0.3)
    versions = [record.version for record in records]
    assert len(set(versions)) == len(versions)
    # Five chances of 0.3 each make 0.83 of a version: 50 of 60, give or take three standard deviations.
    assert 41 <= len(versions) <= 59


def test_a_fault_that_needs_bytes_spares_empty_buckets(tmp_path: Path) -> None:
    records = send_much(tmp_path, kinds=["flip", "truncate"], rate=0.5)
    assert records
    assert not [record for record in records if record.index == 1]


def test_lines_of_several_writers_never_mix(tmp_path: Path) -> None:
    log = tmp_path / "log"
    options = {**always(FaultKind.DROP), "log": str(log), "inner": {"path": str(tmp_path / "store")}}
    engine = CheckpointEngineRegistry().create("faulty:filesystem", options)
    started = threading.Barrier(4)

    def send(half: str) -> None:
        sender = engine.make_sender(half)
        sender.connect(Topology("session", {half: sender.address()}, {}), NoMailbox(), Deadline.after(5))
        started.wait(5)
        for version in range(50):
            sender.send(Bucket(version, 0, torch.zeros(1, dtype=torch.uint8)), [], Deadline.after(5))
        sender.close()

    halves = [f"half-{number}-{'x' * 200}" for number in range(4)]
    with ThreadPoolExecutor(4) as threads:
        list(threads.map(send, halves))
    counted = [record.half for record in read_fault_log(log)]
    assert {half: counted.count(half) for half in halves} == dict.fromkeys(halves, 50)
    assert log.stat().st_mode & 0o777 == 0o600


def test_a_log_that_is_missing_is_empty_and_one_that_is_none_is_refused(tmp_path: Path) -> None:
    assert read_fault_log(tmp_path / "missing") == []
    (tmp_path / "log").write_text('{"at": 1}\n')
    with pytest.raises(ProtocolError, match="not a fault log"):
        read_fault_log(tmp_path / "log")
    with pytest.raises(StorageError):
        read_fault_log(tmp_path)


def test_a_log_that_cannot_be_written_is_a_storage_error(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match="fault log"):
        send_much(tmp_path, rate=1, log=str(tmp_path / "missing" / "log"))


class MemoryConfig(EngineConfig):
    """Options of the engine below."""

    shelf: str


class MemoryEngine(CheckpointEngine):
    """Somebody else's engine: a dictionary of this process."""

    api_version = API_VERSION
    config_type = MemoryConfig
    capabilities = Capabilities(devices=frozenset({"cpu"}), delivery=frozenset({Delivery.STORE}), persistent=True)

    def __init__(self, config: EngineConfig) -> None:
        super().__init__(config)
        self.calls: list[Any] = []

    def make_sender(self, name: str) -> WeightSender:
        return MemorySender(self.calls)

    def make_receiver(self, name: str) -> WeightReceiver:
        raise NotImplementedError


class MemorySender(WeightSender):
    """Notes what it is asked for."""

    def __init__(self, calls: list[Any]) -> None:
        self._calls = calls

    def address(self) -> dict[str, Any]:
        return {"shelf": 1}

    def connect(self, topology: Topology, mailbox: Any, deadline: Deadline) -> None:
        self._calls.append("connect")

    def send(self, bucket: Bucket, receivers: Any, deadline: Deadline) -> None:
        self._calls.append((bucket.version, bucket.index, list(receivers), bucket.data.tolist(), bucket.lasting))

    def open_version(self, files: Any, deadline: Deadline) -> None:
        self._calls.append(("open", files))

    def commit_version(self, version: int, documents: Any, deadline: Deadline) -> None:
        self._calls.append(("commit", version, documents))

    def close(self) -> None:
        self._calls.append("close")


def test_an_engine_that_the_wrapper_has_never_heard_of_is_wrapped_all_the_same() -> None:
    cls = faulty(MemoryEngine)
    engine = cls(cls.config_type.model_validate({"inner": {"shelf": "top"}, **always(FaultKind.REORDER)}))
    assert isinstance(engine.config.inner, MemoryConfig)  # type: ignore[attr-defined]
    sender = engine.make_sender("s")
    calls = engine._inner.calls  # type: ignore[attr-defined]
    assert sender.address() == {"shelf": 1}
    sender.connect(Topology("session", {}, {}), NoMailbox(), Deadline.after(1))
    sender.open_version("files", Deadline.after(1))  # type: ignore[arg-type]
    reused = torch.zeros(2, dtype=torch.uint8)
    for index in range(3):
        sender.send(Bucket(7, index, reused.fill_(index), lasting=True), ["r"], Deadline.after(1))
    sender.commit_version(7, {"a": "b"}, Deadline.after(1))
    sender.close()
    buckets = [(7, index, ["r"], [index, index], True) for index in (1, 0, 2)]
    assert calls == ["connect", ("open", "files"), *buckets, ("commit", 7, {"a": "b"}), "close"]
