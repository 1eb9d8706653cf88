"""Frames, headers, messages and files of arbitrary bytes are read or refused, soon and in little memory."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import struct
import tempfile
import threading
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import links
import pytest
import torch
from fuzzing import REGISTRY, mutated, mutated_bytes, peak_bytes, survives
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save
from sessions import KEYS, descriptors, signed, soon, wait_until_closed
from waiting import HANG_S

from weightlane.ckpt_engines import Bucket, Deadline, ProtocolError, Topology, WeightlaneError
from weightlane.ckpt_engines.channels.channel import Channel, Frame, Keys
from weightlane.ckpt_engines.runtime.devices import HOST
from weightlane.ckpt_engines.toolkit.bucket_messages import expect
from weightlane.ckpt_engines.waits import Lifecycle
from weightlane.rollout.layout.loading.checkpoint_expectation import expectation_of
from weightlane.sync import Rendezvous
from weightlane.sync.control.hub.hub import ControlConnection
from weightlane.sync.control.messages import Kind, Stop, full_text, to_bytes


@pytest.fixture
def ends() -> Iterator[Callable[[bytes], Channel]]:
    """Makes a channel whose peer has sent some bytes and hung up."""
    life = Lifecycle("receiver r", lambda: None)
    opened: list[Channel] = []

    def make(sent: bytes) -> Channel:
        for channel in opened:
            channel.close()
        bare, other = socket.socketpair()
        opened.append(Channel(other, KEYS, life, "s"))
        with bare:
            bare.sendall(sent)
        return opened[-1]

    yield make
    for channel in opened:
        channel.close()
    life.close()


ANNOUNCED = {"version": 1, "index": 0, "nbytes": 4, "segment": 0, "offset": 0}


@pytest.mark.property
def test_frames_and_announcements_are_read_or_refused(ends: Callable[[bytes], Channel]) -> None:
    bucket = Bucket(1, 0, torch.zeros(4, dtype=torch.uint8))
    valid = signed(json.dumps(ANNOUNCED).encode())
    assert expect(ends(valid), bucket, soon()) == ANNOUNCED

    @given(mutated_bytes(valid) | mutated(ANNOUNCED))
    def fuzz(changed: Any) -> None:
        sent = changed if isinstance(changed, bytes) else signed(json.dumps(changed).encode())
        survives(lambda: expect(ends(sent), bucket, soon()))

    fuzz()


@pytest.mark.property
def test_a_hostile_sender_of_shared_memory_gets_nothing_but_typed_errors(socket_dir: Path) -> None:
    """It has been let in, and announces segments that are none."""
    engine = REGISTRY.create("shm", {"socket_dir": str(socket_dir)})
    announced = {**ANNOUNCED, "lasting": True, "retired": [], "described": {"nbytes": 4096, "descriptors": 1}}

    def offer(plain: Any, *, view: bool = False) -> None:
        receiver: Any = engine.make_receiver("r", HOST)
        ours, theirs = socket.socketpair()
        unsealed = os.memfd_create("weightlane-test")
        os.truncate(unsealed, 4096)
        channel = Channel(theirs, KEYS, Lifecycle("link", lambda: None), "s")
        try:
            with ours:
                ours.sendall(signed(json.dumps(plain).encode()))
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

    @given(mutated(announced), st.booleans())
    def fuzz(plain: Any, view: bool) -> None:
        survives(lambda: offer(plain, view=view))

    before = descriptors()
    fuzz()
    wait_until_closed(before)


HEADER = [1, 0, 4, True, None, "xxh3:0"]


@pytest.mark.property
def test_headers_of_buckets_are_read_or_refused_whoever_made_them(ends: Callable[[bytes], Channel]) -> None:
    """The headers come from a peer that knows the session's key, and from others who changed the bytes that it signed."""
    bucket = Bucket(1, 0, torch.zeros(4, dtype=torch.uint8))

    def hear(said: Any) -> str:
        def say(channel: Channel) -> None:
            channel.send_json({"bucket": said}, soon())
            channel.close()

        with links.told_by(say) as link:
            return link.post(bucket, "s", soon())

    assert hear(HEADER) == "xxh3:0"
    messages = [{"bucket": [1, index, *HEADER[2:]]} for index in range(2)]

    @given(mutated_bytes(b"".join(signed(json.dumps(each).encode(), number) for number, each in enumerate(messages))))
    def forged(sent: bytes) -> None:
        channel, heard = ends(sent), list[Any]()
        with contextlib.suppress(WeightlaneError):
            while True:
                heard.append(channel.receive_json(soon(), "a header"))
        assert heard == messages[: len(heard)], "which its sender has said"

    @given(mutated(HEADER))
    def malformed(said: Any) -> None:
        survives(lambda: hear(said))

    ends(b"")
    before = descriptors()
    forged()
    malformed()
    wait_until_closed(before)


@pytest.mark.property
def test_an_inbox_and_a_mailbox_give_back_what_a_member_put_there_and_refuse_everything_else() -> None:
    rendezvous = Rendezvous.host()
    mailbox = rendezvous.mailbox("s")
    rendezvous.listen("a")

    def put(body: bytes) -> None:
        rendezvous.tell(Frame(Kind.PUT, 0, "s\nkey", body))

    @given(mutated_bytes(b'{"type": "stop"}') | mutated_bytes(to_bytes(["a long value"] * 5000)))
    def malformed(body: bytes) -> None:
        put(body)
        survives(lambda: mailbox.get("key", soon()))
        rendezvous.tell(Frame(Kind.POST, 0, "a", body))
        survives(lambda: rendezvous.receive(soon()))

    malformed()
    for nested in (b"[" * 100_000, zlib.compress(b"[" * 100_000)):
        put(nested)
        with pytest.raises(ProtocolError):
            mailbox.get("key", soon())
    mailbox.put("key", {"a": 1})
    assert mailbox.get("key", soon()) == {"a": 1}
    rendezvous.post("a", Stop())
    assert rendezvous.receive(soon()) == Stop()
    assert rendezvous.receive(Deadline.after(0.0)) is None


def test_a_few_bytes_that_stand_for_many_take_no_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("weightlane.sync.control.messages.MOST_BYTES", 1 << 16)
    stands_for_32_mib = zlib.compress(b"[" + b"0," * (1 << 24) + b"0]")

    def unpack() -> None:
        with pytest.raises(ProtocolError, match="too long"):
            full_text(stands_for_32_mib, "a bomb")

    assert peak_bytes(unpack) < 1 << 20


@pytest.mark.property
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


CHECKPOINT = save({"model.embed_tokens.weight": torch.zeros(4, 2), "b": torch.zeros(0)})
HEADER_END = 8 + int.from_bytes(CHECKPOINT[:8], "little")


def _checkpoint(header: Any, data: bytes = CHECKPOINT[HEADER_END:]) -> bytes:
    body = json.dumps(header).encode()
    return struct.pack("<Q", len(body)) + body + data


@given(
    mutated_bytes(CHECKPOINT)
    | mutated(json.loads(CHECKPOINT[8:HEADER_END])).map(_checkpoint)
    | st.integers(0, 2**64 - 1).map(lambda length: struct.pack("<Q", length) + CHECKPOINT[8:])
)
def test_a_checkpoints_header_is_read_or_refused(file: bytes) -> None:
    with tempfile.TemporaryDirectory() as directory:
        (Path(directory) / "model.safetensors").write_bytes(file)
        survives(lambda: expectation_of(directory, dtype=torch.bfloat16, tied_embeddings=True))
