"""Whatever a peer, a file or a user hands in: our own typed errors come out, soon, and without much memory.

Examples are derandomized; ``WEIGHTLANE_FUZZ=5000 pytest tests/security/test_fuzz.py`` tries that many random ones instead.
"""

from __future__ import annotations

import contextlib
import copy
import json
import os
import socket
import struct
import tempfile
import threading
import tracemalloc
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import links
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import save
from sessions import descriptors, frame, soon
from waiting import HANG_S

from weightlane.ckpt_engines import (
    Bucket,
    CheckpointEngineRegistry,
    ProtocolError,
    StagingMemoryError,
    Topology,
    WeightlaneError,
    error_from_wire,
)
from weightlane.ckpt_engines.channels.channel import Channel
from weightlane.ckpt_engines.channels.local_socket import socket_name
from weightlane.ckpt_engines.channels.mac import proof, proves
from weightlane.ckpt_engines.channels.meeting import host_and_port
from weightlane.ckpt_engines.engines.faulty.fault_log import read_fault_log
from weightlane.ckpt_engines.engines.filesystem.file_names import parse_latest, parse_sender
from weightlane.ckpt_engines.runtime.devices import HOST
from weightlane.ckpt_engines.runtime.lifecycle import Lifecycle
from weightlane.ckpt_engines.toolkit.bucket_messages import expect
from weightlane.rollout.commit.remote_failure import failure_from_text
from weightlane.rollout.layout.loading.expectation import expectation_of
from weightlane.sync import Manifest, Rendezvous, RendezvousAddress
from weightlane.sync.control.hub.connection import ControlConnection
from weightlane.sync.control.hub.frames import Frame, Kind
from weightlane.sync.control.hub.handshake import Keys
from weightlane.sync.control.hub.plain_bytes import full_text, to_bytes
from weightlane.sync.control.messages import Stop, decode
from weightlane.sync.plan.supply import Supply
from weightlane.sync.receive.stored_version import read_version
from weightlane.sync.version.bucket_checksums import checksum_of
from weightlane.sync.version.bucket_checksums import verify as verify_bucket
from weightlane.sync.version.placement import Placement
from weightlane.sync.version.safetensors_files import MANIFEST_FILE, manifest_of_document

RANDOM_EXAMPLES = int(os.environ.get("WEIGHTLANE_FUZZ", "0"))
MEMORY_LIMIT_BYTES = 64 << 20
REGISTRY = CheckpointEngineRegistry()


def fuzzed(examples: int) -> settings:
    """How many examples to try, and that they are the same ones every time."""
    return settings(
        max_examples=RANDOM_EXAMPLES or examples,
        derandomize=not RANDOM_EXAMPLES,
        database=None,
        deadline=None,
        suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
    )


_NUMBERS = [2**31, 2**63, 2**64, -1, -(2**63), 10**4000, 1e308, float("inf"), float("nan"), True]
_TEXTS = ["", "\0", "\ud800", "../x", "/", "0", "x" * 10_000]
NASTY = st.sampled_from([*_NUMBERS, *_TEXTS, None])
TEXT = st.text(st.characters(), max_size=20)
LEAF = st.none() | st.booleans() | st.integers() | st.floats() | TEXT | NASTY
JSON = st.recursive(LEAF, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(TEXT, inner, max_size=4))


@st.composite
def mutated(draw: st.DrawFn, valid: Any) -> Any:
    """`valid` plain data, of which one to three places were replaced, removed, renamed or doubled; or something else."""
    if draw(st.integers(0, 9)) == 0:
        return draw(JSON)
    plain = {"": copy.deepcopy(valid)}
    for _ in range(draw(st.integers(1, 3))):
        places = list(_places(plain))
        container, key = places[draw(st.integers(0, len(places) - 1))]
        change = draw(st.sampled_from(["replace", "replace", "remove", "double"]))
        if change == "replace" or key == "":
            container[key] = draw(JSON)
        elif change == "remove":
            del container[key]
        elif isinstance(container, list):
            container.insert(key, copy.deepcopy(container[key]))
        else:
            container[draw(TEXT)] = copy.deepcopy(container[key])
    return plain.get("")


def _places(container: Any) -> Iterator[tuple[Any, Any]]:
    keys = list(container) if isinstance(container, dict) else range(len(container))
    for key in keys:
        yield container, key
        if isinstance(container[key], dict | list):
            yield from _places(container[key])


@st.composite
def mutated_bytes(draw: st.DrawFn, valid: bytes) -> bytes:
    """`valid` bytes with some changed, cut, or added; or any others."""
    if draw(st.integers(0, 9)) == 0:
        return draw(st.binary(max_size=300))
    data = bytearray(valid)
    for _ in range(draw(st.integers(1, 4))):
        place = draw(st.integers(0, len(data)))
        change = draw(st.sampled_from(["set", "cut", "insert"]))
        if change == "set" and place < len(data):
            data[place] = draw(st.integers(0, 255))
        elif change == "cut":
            del data[place:]
        else:
            data[place:place] = draw(st.binary(max_size=9))
    return bytes(data)


def survives(call: Callable[[], Any]) -> None:
    """`call` returns or raises one of our errors, whose text can be told and sent on; nothing else."""
    try:
        call()
    except WeightlaneError as error:
        str(error)
        json.dumps(error.to_wire())


def peak_bytes(call: Callable[[], Any]) -> int:
    """The most bytes that Python's objects took at once while `call` ran, beyond those from before."""
    tracemalloc.start()
    try:
        call()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


MANIFEST = {
    "version": 3,
    "codec": "dense",
    "base_version": None,
    "bucket_bytes": 128,
    "tensors": [["a", [2, 3], "float32"], ["b", [], "bfloat16"], ["c", [0, 5], "bool"]],
}
ERROR = {"type": "PeerLostError", "message": "gone", "part": "p", "peer": "q", "hint": "h"}
MESSAGES = [
    {"type": "connect", "session": "s", "publishers": ["t"], "senders": {"t": {}}, "receivers": {}, "deadline_s": 1.0},
    {"type": "open", "session": "s", "version": 1, "manifest": MANIFEST, "deadline_s": 1.0, "stall_s": 1.0},
    {"type": "failed", "name": "n", "session": "s", "version": 1, "error": ERROR},
    {"type": "hello", "name": "n", "session": "s", "address": {"host": "127.0.0.1", "port": 1}},
]
PLACEMENT = [["a", [2, 3], "float32", [[[0, 0], [1, 3]]]], ["b", [], "bfloat16", [[[], []]]]]
LATEST = {"version": 2, "directory": "run-1/sender-0/v2"}


def parse_manifest(plain: Any) -> None:
    manifest = Manifest.from_plain(plain)
    assert manifest.total_bytes >= 0
    assert manifest.bucket_count >= 0
    assert manifest.window(0)
    assert Manifest.from_plain(manifest.to_plain()) == manifest
    assert manifest.layout_digest


def parse_placement(plain: Any) -> None:
    placement = Placement.from_plain(plain)
    assert placement.nbytes >= 0
    assert Placement.from_plain(placement.to_plain()) == placement


PLAIN: dict[str, tuple[Any, Callable[[Any], Any]]] = {
    "manifest": (MANIFEST, parse_manifest),
    "placement": (PLACEMENT, parse_placement),
    "what trainer ranks send": ([[["trainer-0", PLACEMENT]], 1 << 20, True, "", [1e9, 2e9, 0.0]], Supply.from_plain),
    "rendezvous address": ({"host": "h", "port": 5, "secret": "s"}, RendezvousAddress.from_plain),
    "error": (ERROR, error_from_wire),
    "error text": (ERROR, lambda plain: failure_from_text(f"weightlane-error:{json.dumps({'error': plain})}", part="p")),
    "proof": ("0" * 64, lambda plain: proves(b"key", plain, "label")),
    "TCP address": ({"host": "127.0.0.1", "port": 5}, lambda plain: host_and_port(plain, "part", "peer")),
    "socket name": ({"socket": "weightlane-0123456789abcdef.sock"}, lambda plain: socket_name(plain, "part", "peer")),
    "fault options": (
        {"inner": {"socket_dir": "/tmp"}, "seed": 1, "rate": 0.1, "kinds": ["drop"], "delay_s": 1, "log": "x"},
        lambda plain: REGISTRY.validate_options("faulty:shm", plain),
    ),
    "filesystem options": ({"path": "x"}, lambda plain: REGISTRY.validate_options("filesystem", plain)),
    "newest versions": (
        {**LATEST, "committed": [LATEST, LATEST]},
        lambda plain: parse_latest(json.dumps(plain), "latest.json", "part"),
    ),
    "manifest's file": (
        {"layout_digest": Manifest.from_plain(MANIFEST).layout_digest, "manifest": MANIFEST},
        lambda plain: manifest_of_document(json.dumps(plain)),
    ),
    "sender's file": ({"process": {"pid": 1}, "oldest": 0}, lambda plain: parse_sender(json.dumps(plain))),
}  # fmt: skip
NOT_A_MAPPING = {"rendezvous address", "TCP address", "socket name", "fault options", "filesystem options"}
"""What is handed a mapping by its caller: the connection's own message type, or the configuration's, sees to that."""


@pytest.mark.parametrize("what", PLAIN)
def test_plain_data_is_parsed_or_refused(what: str) -> None:
    valid, parse = PLAIN[what]
    parse(valid)

    @fuzzed(100)
    @given(mutated(valid))
    def fuzz(plain: Any) -> None:
        if what not in NOT_A_MAPPING or isinstance(plain, dict):
            survives(lambda: parse(plain))

    fuzz()


@pytest.mark.parametrize(
    ("what", "plain"),
    [
        ("manifest", {**MANIFEST, "tensors": [["a", [2**62, 2**62], "float64"]]}),
        ("manifest", {**MANIFEST, "tensors": [["a", [10**4000] * 3, "float64"]]}),
        ("manifest", {**MANIFEST, "tensors": [["a", [2**40], "int8"]], "bucket_bytes": 64}),
        ("manifest", {**MANIFEST, "tensors": [["a", [1] * 100_000, "int8"]]}),
        ("manifest", {**MANIFEST, "tensors": [["a", [], "int8"]] * 50_000}),
        ("manifest", {**MANIFEST, "version": 2**63}),
        ("placement", [["a", [10**4000], "int8", []]]),
        ("placement", [["a", [2], "int8", [[[0], [10**4000]]]]]),
        ("placement", [["a", [float("inf")], "int8", []]]),
        ("placement", [["a", [2], "int8", [[["0"], [True]]]]]),
        ("placement", [["a", [2], "int8", [[[0], [1]]] * 100_000]]),
        ("placement", ["123"]),
        ("error", []),
        ("error", {"type": [], "message": {}}),
        ("error", {"type": "SyncAbortedError", "message": 5, "hint": None}),
    ],
)
@pytest.mark.timeout(HANG_S)  # as many steps as the sizes say would take days
def test_sizes_that_lie_cost_neither_time_nor_memory(what: str, plain: Any) -> None:
    assert peak_bytes(lambda: survives(lambda: PLAIN[what][1](plain))) < MEMORY_LIMIT_BYTES


def test_a_stored_version_that_claims_to_be_huge_is_refused(tmp_path: Path) -> None:
    manifest = Manifest.from_plain({**MANIFEST, "tensors": [["a", [2**60], "int8"]], "bucket_bytes": 2**60})
    directory = tmp_path / LATEST["directory"]  # type: ignore[operator]
    directory.mkdir(parents=True)
    (tmp_path / "latest.json").write_text(json.dumps({**LATEST, "committed": [LATEST]}))
    document = {"layout_digest": manifest.layout_digest, "manifest": manifest.to_plain()}
    (directory / MANIFEST_FILE).write_text(json.dumps(document))
    with pytest.raises(StagingMemoryError):
        read_version(str(tmp_path))


class PickyError(WeightlaneError):
    """A third party's error, which cannot be rebuilt from its parts."""

    def __init__(self, code: int) -> None:
        super().__init__(f"code {code}")


def test_an_error_that_cannot_be_rebuilt_keeps_its_text() -> None:
    error = error_from_wire(PickyError(7).to_wire())
    assert type(error) is WeightlaneError
    assert error.message == "code 7"


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: str(message["type"]))
def test_control_messages_are_parsed_or_refused(message: dict[str, Any]) -> None:
    decode(json.dumps(message).encode())

    @fuzzed(100)
    @given(mutated(message) | mutated_bytes(json.dumps(message).encode()))
    def fuzz(changed: Any) -> None:
        survives(lambda: decode(changed if isinstance(changed, bytes) else json.dumps(changed).encode()))

    fuzz()


@pytest.mark.parametrize("seconds", ["NaN", "Infinity", "-Infinity", "1e999"])
def test_a_message_cannot_ask_for_a_wait_that_never_ends(seconds: str) -> None:
    body = json.dumps(MESSAGES[0]).replace("1.0", seconds)
    with pytest.raises(ProtocolError):
        decode(body.encode())


@pytest.mark.parametrize("depth", [1_000, 100_000])
def test_data_nested_without_end_is_refused(depth: int, tmp_path: Path) -> None:
    nested = "[" * depth
    with pytest.raises(ProtocolError):
        decode(b'{"type":"open","manifest":' + nested.encode())
    with pytest.raises(ProtocolError):
        parse_latest(nested, "latest.json", "part")
    assert parse_sender(nested) == ({}, 0)
    assert failure_from_text(f"weightlane-error:{nested}", part="p").intact is False
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map":' + nested)
    with pytest.raises(WeightlaneError):
        expectation_of(tmp_path, dtype=torch.float32, tied_embeddings=False)


def payload(nbytes: int) -> bytes:
    return bytes(index % 251 for index in range(nbytes))


@fuzzed(300)
@given(st.sampled_from([0, 1, 100]).flatmap(lambda nbytes: st.tuples(st.just(nbytes), mutated_bytes(payload(nbytes)))))
def test_a_bucket_passes_its_check_only_unchanged(case: tuple[int, bytes]) -> None:
    nbytes, changed = case
    checksum = checksum_of(torch.tensor(list(payload(nbytes)), dtype=torch.uint8))
    # The engine fills a buffer of the right size, whatever came.
    changed = changed[:nbytes].ljust(nbytes, b"\0")
    try:
        verify_bucket(torch.tensor(list(changed), dtype=torch.uint8), checksum, 7, 2, peer="p")
    except WeightlaneError:
        return
    assert changed == payload(nbytes)


@pytest.fixture
def ends() -> Iterator[Callable[[bytes], Channel]]:
    """Makes a channel whose peer has sent some bytes and hung up."""
    life = Lifecycle("receiver r", lambda: None)
    opened: list[Channel] = []

    def make(sent: bytes) -> Channel:
        for channel in opened:
            channel.close()
        bare, other = socket.socketpair()
        opened.append(Channel(other, life, "s"))
        with bare:
            bare.sendall(sent)
        return opened[-1]

    yield make
    for channel in opened:
        channel.close()
    life.close()


ANNOUNCED = {"version": 1, "index": 0, "nbytes": 4, "segment": 0, "offset": 0}


def test_frames_and_announcements_are_read_or_refused(ends: Callable[[bytes], Channel]) -> None:
    bucket = Bucket(1, 0, torch.zeros(4, dtype=torch.uint8))
    valid = frame(json.dumps(ANNOUNCED).encode())
    assert expect(ends(valid), bucket, soon()) == ANNOUNCED

    @fuzzed(150)
    @given(mutated_bytes(valid) | mutated(ANNOUNCED))
    def fuzz(changed: Any) -> None:
        sent = changed if isinstance(changed, bytes) else frame(json.dumps(changed).encode())
        survives(lambda: expect(ends(sent), bucket, soon()))

    fuzz()


def test_a_hostile_sender_of_shared_memory_gets_nothing_but_typed_errors(socket_dir: Path) -> None:
    """It has been let in, and announces segments that are none."""
    engine = REGISTRY.create("shm", {"socket_dir": str(socket_dir)})
    announced = {**ANNOUNCED, "lasting": True, "retired": [], "described": {"nbytes": 4096, "descriptors": 1}}

    def offer(plain: Any, *, view: bool = False) -> None:
        receiver: Any = engine.make_receiver("r", HOST)
        ours, theirs = socket.socketpair()
        unsealed = os.memfd_create("weightlane-test")
        os.truncate(unsealed, 4096)
        channel = Channel(theirs, Lifecycle("link", lambda: None), "s")
        try:
            with ours:
                ours.sendall(frame(json.dumps(plain).encode()))
                socket.send_fds(ours, [b"\0"], [unsealed])
                receiver.connect(Topology("s", {"s": {}}, {"r": {}}), {"s": channel}, soon())
                ours.shutdown(socket.SHUT_WR)
                if view:
                    receiver.view(1, 0, 4, "s", soon())
                else:
                    receiver.post(Bucket(1, 0, torch.zeros(4, dtype=torch.uint8)), "s")
                    receiver.flush(soon())
        finally:
            receiver.close()
            channel.close()
            os.close(unsealed)

    for view in (False, True):
        with pytest.raises(ProtocolError, match="not sealed"):
            offer(announced, view=view)
    with pytest.raises(ProtocolError, match="not lasting"):
        offer({**announced, "lasting": 1}, view=True)

    @fuzzed(60)
    @given(mutated(announced), st.booleans())
    def fuzz(plain: Any, view: bool) -> None:
        survives(lambda: offer(plain, view=view))

    before = descriptors()
    fuzz()
    assert descriptors() == before


HEADER = [1, 0, 4, True, "xxh3:0"]


def test_headers_of_buckets_are_read_or_refused_whoever_made_them() -> None:
    """By somebody who knows the session's key, and by others who changed what it says."""
    bucket = Bucket(1, 0, torch.zeros(4, dtype=torch.uint8))

    def signed(said: Any) -> bytes:
        claim = proof(links.KEY, "weightlane bucket", links.SESSION, json.dumps(said))
        return frame(json.dumps({"bucket": said, "proof": claim}).encode())

    def hear(sent: bytes) -> str:
        def say(channel: Channel) -> None:
            channel.send(sent, soon())
            channel.close()

        with links.told_by(say) as link:
            return link.post(bucket, "s", soon())

    assert hear(signed(HEADER)) == "xxh3:0"

    @fuzzed(40)
    @given(mutated_bytes(signed(HEADER)))
    def forged(sent: bytes) -> None:
        try:
            heard = hear(sent)
        except WeightlaneError:
            return
        assert heard == "xxh3:0", "which its sender has said"

    @fuzzed(40)
    @given(mutated(HEADER))
    def malformed(said: Any) -> None:
        survives(lambda: hear(signed(said)))

    before = descriptors()
    forged()
    malformed()
    assert descriptors() == before


@pytest.fixture(scope="module")
def rendezvous() -> Rendezvous:
    return Rendezvous.host()


def test_a_mailbox_gives_back_what_a_member_put_there_and_refuses_everything_else(rendezvous: Rendezvous) -> None:
    mailbox = rendezvous.mailbox("s")

    @fuzzed(80)
    @given(mutated_bytes(b'{"a": 1}'))
    def malformed(body: bytes) -> None:
        rendezvous._client.tell(Frame(Kind.PUT, 0, "s\nkey", body))
        survives(lambda: mailbox.get("key", soon()))

    @fuzzed(80)
    @given(mutated_bytes(to_bytes(["a long value"] * 5000)))
    def malformed_and_long(body: bytes) -> None:
        rendezvous._client.tell(Frame(Kind.PUT, 0, "s\nkey", body))
        survives(lambda: mailbox.get("key", soon()))

    malformed()
    malformed_and_long()
    for nested in (b"[" * 100_000, zlib.compress(b"[" * 100_000)):
        rendezvous._client.tell(Frame(Kind.PUT, 0, "s\nkey", nested))
        with pytest.raises(ProtocolError):
            mailbox.get("key", soon())
    mailbox.put("key", {"a": 1})
    assert mailbox.get("key", soon()) == {"a": 1}


def test_a_few_bytes_that_stand_for_many_take_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("weightlane.sync.control.hub.plain_bytes.MOST_BYTES", 1 << 16)
    stands_for_32_mib = zlib.compress(b"[" + b"0," * (1 << 24) + b"0]")

    def unpack() -> None:
        with pytest.raises(ProtocolError, match="too long"):
            full_text(stands_for_32_mib, "a bomb")

    assert peak_bytes(unpack) < 1 << 20


def test_an_inbox_refuses_what_is_no_message(rendezvous: Rendezvous) -> None:
    inbox = rendezvous.inbox("a")

    @fuzzed(80)
    @given(mutated_bytes(b'{"type": "stop"}'))
    def malformed(body: bytes) -> None:
        rendezvous._client.tell(Frame(Kind.POST, 0, "a", body))
        survives(lambda: inbox.get(soon()))

    malformed()
    rendezvous.post("a", Stop())
    assert inbox.get(soon()) == Stop()
    assert inbox.get_nowait() is None


def test_of_a_control_connection_nothing_is_believed_but_what_was_signed_for_its_place_in_it() -> None:
    keys, other = Keys(b"k" * 32, b"o" * 32), Keys(b"o" * 32, b"k" * 32)
    frames = [Frame(Kind.POST, number, "inbox", b"body" * number) for number in range(3)]
    ours, theirs = socket.socketpair()
    sending = ControlConnection(theirs, keys, lambda _: None, lambda _: None)
    sent = []
    for each in frames:
        sending.send(each)
        sent.append(ours.recv(1 << 16))
    stream = b"".join(sent)

    @fuzzed(80)
    @given(mutated_bytes(stream))
    def changed(data: bytes) -> None:
        one, far = socket.socketpair()
        far.setblocking(False)
        got: list[Frame] = []
        ended = threading.Event()
        ControlConnection(far, other, got.append, lambda _: ended.set()).start()
        with one, contextlib.suppress(OSError):  # it hangs up on what is no frame
            one.sendall(data)
        assert ended.wait(HANG_S)
        assert got == frames[: len(got)]

    changed()
    first, second, third = sent
    for data in (first + first, first + second + second, second + third, first + third, second + first):
        changed.hypothesis.inner_test(data)  # whole frames are repeated, left out, or swapped
    ours.close()
    theirs.close()


def test_a_fault_log_is_read_or_refused(tmp_path: Path) -> None:
    line = b'{"at":1.0,"half":"h","session":"s","version":1,"index":0,"kind":"drop"}\n'
    log = tmp_path / "log"

    @fuzzed(100)
    @given(mutated_bytes(line * 2))
    def fuzz(changed: bytes) -> None:
        log.write_bytes(changed)
        survives(lambda: read_fault_log(log))

    log.write_bytes(line * 2)
    assert len(read_fault_log(log)) == 2
    fuzz()


CHECKPOINT = save({"model.embed_tokens.weight": torch.zeros(4, 2), "b": torch.zeros(0)})
HEADER_END = 8 + int.from_bytes(CHECKPOINT[:8], "little")


def _checkpoint(header: Any, data: bytes = CHECKPOINT[HEADER_END:]) -> bytes:
    body = json.dumps(header).encode()
    return struct.pack("<Q", len(body)) + body + data


@fuzzed(250)
@given(
    mutated_bytes(CHECKPOINT)
    | mutated(json.loads(CHECKPOINT[8:HEADER_END])).map(_checkpoint)
    | st.integers(0, 2**64 - 1).map(lambda length: struct.pack("<Q", length) + CHECKPOINT[8:])
)
def test_a_checkpoints_header_is_read_or_refused(file: bytes) -> None:
    with tempfile.TemporaryDirectory() as directory:
        (Path(directory) / "model.safetensors").write_bytes(file)
        survives(lambda: expectation_of(directory, dtype=torch.bfloat16, tied_embeddings=True))


@fuzzed(120)
@given(mutated({"metadata": {}, "weight_map": {"a": "model.safetensors", "b": "model.safetensors"}}))
def test_a_checkpoints_index_is_read_or_refused(index: Any) -> None:
    with tempfile.TemporaryDirectory() as directory:
        (Path(directory) / "model.safetensors").write_bytes(CHECKPOINT)
        (Path(directory) / "model.safetensors.index.json").write_text(json.dumps(index))
        survives(lambda: expectation_of(directory, dtype=torch.bfloat16, tied_embeddings=False))
