"""Control connections: where they are made, who is let in, what a stranger can do, and how much a message may cost."""

from __future__ import annotations

import errno
import json
import math
import socket
import stat
import struct
import tracemalloc
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partialmethod
from pathlib import Path
from typing import Any

import pytest
from sessions import KEYS, frame, signed, soon
from waiting import HANG_S, wait_until

from weightlane.ckpt_engines import ConfigError, Deadline, DeadlineExceededError, ProtocolError, TransportError, toolkit
from weightlane.ckpt_engines.channels import io_loop
from weightlane.ckpt_engines.channels.channel import Channel
from weightlane.ckpt_engines.channels.handshake import Hello
from weightlane.ckpt_engines.channels.joining import accept_receivers, dial, welcome, welcomed
from weightlane.ckpt_engines.channels.listener import Listener, listen_tcp
from weightlane.ckpt_engines.channels.socket_factory import host_identity
from weightlane.ckpt_engines.waits import Lifecycle

KEY, OTHER_KEY = b"k" * 32, b"o" * 32
SESSION = "session-1"


class Lobby:
    """A sender that waits for receivers `a` and `b`, and everything that was opened on the way."""

    def __init__(self, key: bytes) -> None:
        self.listener = Listener(listen_tcp("127.0.0.1"), {})
        self.address = self.listener.socket.getsockname()
        self.life, self.dialling = (Lifecycle(part, lambda: None) for part in ("sender s", "receiver"))
        self.threads = ThreadPoolExecutor(4)
        self.channels: list[Channel] = []
        self.sockets: list[socket.socket] = []
        self.joined: Future[dict[str, Channel]] = self.threads.submit(self._accept, key)

    def _accept(self, key: bytes) -> dict[str, Channel]:
        (channels,) = accept_receivers(self.listener, self.life, SESSION, ["a", "b"], soon(), key=key)
        self.channels += channels.values()
        welcome(channels.values(), soon())
        return channels

    def dial(self, name: str, key: bytes, lane: str = "") -> Future[str]:
        return self.threads.submit(self._dial, name, key, lane)

    def _dial(self, name: str, key: bytes, lane: str) -> str:
        channel = dial(self.address, self.dialling, soon(), peer="s", key=key, hello=Hello(SESSION, name, lane))
        self.channels.append(channel)
        welcomed(channel, soon())
        return "welcome"

    def stranger(self, *sent: bytes) -> socket.socket:
        """Connect, and send something once the challenge has come."""
        sock = socket.create_connection(self.address, timeout=HANG_S)
        self.sockets.append(sock)
        self.challenge = message(sock)
        sock.sendall(b"".join(sent))
        return sock

    def expect_everybody(self) -> None:
        """Both receivers come now, and are let in."""
        welcomes = [self.dial(name, KEY) for name in ("a", "b")]
        assert [welcome.result(HANG_S) for welcome in welcomes] == ["welcome"] * 2

    def close(self) -> None:
        for resource in (self.life, self.dialling, *self.channels, *self.sockets, self.listener):
            resource.close()
        self.threads.shutdown()


@pytest.fixture
def lobby() -> Iterator[Callable[[bytes], Lobby]]:
    opened: list[Lobby] = []

    def open_lobby(key: bytes) -> Lobby:
        opened.append(Lobby(key))
        return opened[-1]

    yield open_lobby
    for one in opened:
        one.close()


def message(sock: socket.socket) -> dict[str, Any]:
    """The next message of a handshake."""
    (length,) = struct.unpack("<I", sock.recv(4, socket.MSG_WAITALL))
    return dict(json.loads(sock.recv(length, socket.MSG_WAITALL)))


def refusal(sock: socket.socket) -> str:
    """Return the reason that the sender gives for its refusal before it hangs up."""
    said = str(message(sock)["refused"])
    assert sock.recv(1) == b""
    return said


def test_a_receiver_without_the_key_is_refused_and_disturbs_nobody(lobby: Callable[[bytes], Lobby]) -> None:
    sender = lobby(KEY)
    first = sender.dial("a", KEY)
    for wrong in (OTHER_KEY, b"", KEY[:-1]):
        with pytest.raises(ProtocolError, match="did not prove"):
            sender.dial("b", wrong).result(HANG_S)
    second = sender.dial("b", KEY)
    assert [first.result(HANG_S), second.result(HANG_S)] == ["welcome"] * 2
    assert list(sender.joined.result(HANG_S)) == ["a", "b"]


Answer = Callable[[dict[str, Any]], dict[str, Any]]


def dial_impostor(life: Lifecycle, challenge: dict[str, Any], answer: Answer) -> None:
    """Dial, as receiver `a`, an impostor of the sender that sends `challenge`, and replies to the hello with `answer`."""

    def serve() -> None:
        sock, _ = listener.accept()
        with sock:
            sock.sendall(frame(json.dumps(challenge).encode()))
            sock.sendall(frame(json.dumps(answer(message(sock))).encode()))
            sock.recv(1)

    with listen_tcp("127.0.0.1") as listener, ThreadPoolExecutor(1) as threads:
        threads.submit(serve)
        dial(listener.getsockname(), life, soon(), peer="s", key=KEY, hello=Hello(SESSION, "a"))


def test_an_impostor_can_neither_make_up_nor_repeat_nor_mirror_the_senders_proof(
    lobby: Callable[[bytes], Lobby],
) -> None:
    sender = lobby(KEY)
    recorded: list[dict[str, Any]] = []
    real = sender.stranger()

    def forward(hello: dict[str, Any]) -> dict[str, Any]:
        """Forward the hello to the real sender and record its reply; return a made-up proof."""
        real.sendall(frame(json.dumps(hello).encode()))
        recorded.append(message(real))
        return {"proof": "0" * 64}

    for answer in (forward, lambda _: recorded[0], lambda hello: {"proof": hello["proof"]}, lambda _: {}):
        with pytest.raises(ProtocolError, match="does not know"):
            dial_impostor(sender.dialling, sender.challenge, answer)
    assert len(recorded[0]["proof"]) == 64
    for other in ({}, {"nonce": 1, "silence_s": 0}, {"nonce": "0", "silence_s": -1}, {"nonce": "0", "silence_s": True}):
        with pytest.raises(ProtocolError, match="does not know"):
            dial_impostor(sender.dialling, other, lambda _: recorded[0])


def test_a_recorded_hello_opens_no_other_connection(lobby: Callable[[bytes], Lobby]) -> None:
    sender, recorded = lobby(KEY), dict[str, Any]()
    real = sender.stranger()
    with pytest.raises(ProtocolError):
        dial_impostor(sender.dialling, sender.challenge, lambda hello: recorded.update(hello) or {})
    changes: list[dict[str, str]] = [{}, {"name": "b"}, {"lane": "engine"}, {"session": "s"}]
    hello, renamed, other_lane, other = (frame(json.dumps(recorded | each).encode()) for each in changes)
    assert KEY not in hello
    assert KEY.hex().encode() not in hello
    assert "another session" in refusal(sender.stranger(other))
    for changed in (hello, renamed):
        assert "did not prove" in refusal(sender.stranger(changed))
    assert "not the name" in refusal(sender.stranger(other_lane))
    real.sendall(hello)  # it is of use where it was asked for
    assert "proof" in message(real)
    with pytest.raises(ProtocolError, match="connected already"):
        sender.dial("a", KEY).result(HANG_S)


def test_whatever_a_stranger_says_it_is_refused_in_words_and_the_others_get_in(lobby: Callable[[bytes], Lobby]) -> None:
    sender = lobby(KEY)

    def hello(**said: object) -> bytes:
        return frame(json.dumps({**Hello(SESSION, "a")._asdict(), **said}).encode())

    for sent, said in (
        (frame(b"[" * 4000), "another session"),
        (struct.pack("<I", 2**32 - 1), "another session"),
        (hello(session=[SESSION]), "another session"),
        (hello(name="nobody"), "not the name of a receiver"),
        (hello(name=["a"]), "not the name of a receiver"),
        (hello(lane="other"), "not the name of a receiver"),
        (hello(nonce="\ud800", proof="\ud800"), "did not"),
        (hello(nonce=5, proof=["x"]), "did not"),
    ):
        assert said in refusal(sender.stranger(sent))
    sender.expect_everybody()


def test_strangers_that_say_nothing_do_not_use_up_the_senders_descriptors(lobby: Callable[[bytes], Lobby]) -> None:
    sender = lobby(KEY)
    silent = [sender.stranger(b"\1") for _ in range(200)]
    assert silent[0].recv(1) == b""  # it was dropped to make room
    silent[-1].setblocking(False)
    with pytest.raises(BlockingIOError):
        silent[-1].recv(1)
    sender.expect_everybody()


def test_a_sender_without_file_descriptors_says_so_at_its_deadline_and_lets_receivers_in_once_it_has_some(
    lobby: Callable[[bytes], Lobby], monkeypatch: pytest.MonkeyPatch
) -> None:
    accept = socket.socket.accept
    failed: list[socket.socket] = []

    def try_to_accept(listener: socket.socket, *, times: float) -> Any:
        if len(failed) < times:
            failed.append(listener)
            raise OSError(errno.EMFILE, "Too many open files")
        return accept(listener)

    life = Lifecycle("sender s", lambda: None)
    monkeypatch.setattr(socket.socket, "accept", partialmethod(try_to_accept, times=math.inf))
    with (
        listen_tcp("127.0.0.1") as listener,
        socket.create_connection(listener.getsockname()),
        pytest.raises(DeadlineExceededError, match=r"a to connect.*ulimit -n"),
    ):
        accept_receivers(Listener(listener, {}), life, SESSION, ["a"], Deadline.after(0.5))
    assert len(failed) < 100, "it does not spin"
    life.close()
    failed.clear()
    monkeypatch.setattr(socket.socket, "accept", partialmethod(try_to_accept, times=2))
    lobby(KEY).expect_everybody()


def test_what_serves_a_socket_is_forgotten_with_it_though_others_are_served_and_nothing_happens() -> None:
    class Server:
        def handle(self, _: int) -> None:
            io_loop.unwatch(sockets[0])

    sockets, others = socket.socketpair(), socket.socketpair()
    server = Server()
    io_loop.watch(others[0], lambda _: io_loop.unwatch(others[0]))  # keeps the loop alive
    io_loop.watch(sockets[0], server.handle)
    forgotten = weakref.ref(server)
    del server
    sockets[1].send(b"event")
    wait_until(lambda: forgotten() is None, "end of the server of the first socket")
    others[1].send(b"end")
    for each in (*sockets, *others):
        each.close()


def test_a_message_that_is_too_long_or_no_json_object_is_refused_before_it_takes_memory() -> None:
    life = Lifecycle("receiver r", lambda: None)
    bare, other = socket.socketpair()
    channel = Channel(other, KEYS, life, "s")
    for number, sent in enumerate((b"[1]", b"\xff", b'{"a":' * 12_000, b"")):
        bare.sendall(signed(sent, number))
        with pytest.raises(ProtocolError, match="not a JSON object"):
            channel.receive_json(soon(), "a message")
    bare.sendall(struct.pack("<I", 2**32 - 1) + b"{}")
    tracemalloc.start()
    with pytest.raises(ProtocolError, match="too long"):
        channel.receive_json(soon(), "a message")
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 1 << 20
    for closable in (channel, bare, life):
        closable.close()


def test_a_host_that_is_none_is_a_typed_error() -> None:
    life = Lifecycle("receiver r", lambda: None)
    for host in ("a..b", "nul\0", "", "\ud800", "256.0.0.1"):
        with pytest.raises(TransportError):
            dial((host, 1), life, soon(), peer="s", key=KEY, hello=Hello(SESSION, "r"))
    life.close()


def test_a_receiver_is_let_in_when_it_has_said_hello_on_every_lane(monkeypatch: pytest.MonkeyPatch) -> None:
    """The sender's host has two addresses more: at one nobody listens, and at the other nobody answers."""
    life, dialling = (Lifecycle(part, lambda: None) for part in ("sender s", "receiver"))
    lanes = ("control", "engine")
    listener = Listener(listen_tcp("127.0.0.1"), {})
    address = listener.socket.getsockname()
    silent = socket.create_server(("127.0.0.8", address[1]), backlog=0)
    all_that_it_takes = socket.create_connection(silent.getsockname())
    found = [(socket.AF_INET, 0, 0, "", (ip, address[1])) for ip in ("127.0.0.9", "127.0.0.8", "127.0.0.1")]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: found)
    monkeypatch.setattr("weightlane.ckpt_engines.channels.joining._ADDRESS_S", 0.05)
    with silent, all_that_it_takes, ThreadPoolExecutor(1) as threads:
        accepting = threads.submit(accept_receivers, listener, life, SESSION, ["a", "b"], soon(), lanes=lanes, key=KEY)
        dialled = {
            (lane, name): dial(address, dialling, soon(), peer="s", key=KEY, hello=Hello(SESSION, name, lane))
            for lane, name in (("engine", "b"), ("control", "a"), ("control", "b"), ("engine", "a"))
        }
        joined = accepting.result()
    for lane, channels in zip(lanes, joined, strict=True):
        assert list(channels) == ["a", "b"]
        for name, channel in channels.items():
            channel.send_json({"to": [lane, name]}, soon())
            assert dialled[lane, name].receive_json(soon(), "a message") == {"to": [lane, name]}
            channel.close()
            dialled[lane, name].close()
    life.close()
    dialling.close()


def test_over_tcp_it_listens_on_one_address_and_what_it_says_of_itself_is_where_it_is_found() -> None:
    sockets = toolkit.TcpSocketFactory("127.0.0.1")
    listener = sockets.listen("sender s")
    target = sockets.target(listener.address, "receiver r", "s")
    assert target == listener.socket.getsockname()
    assert target[0] == "127.0.0.1"
    socket.create_connection(target).close()
    listener.close()
    listener.close()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(target)
    for address in ({}, {"host": "h"}, {"host": "h", "port": "1"}, {"host": "h", "port": 2**16}, {"host": 1}):
        with pytest.raises(ProtocolError, match="not an address"):
            sockets.target(address, "receiver r", "s")
    for host, port, says in (("0", 0, "wildcard"), ("::ffff:0.0.0.0", 0, "wildcard"), ("127.0.0.1", 2**16, "port")):
        with pytest.raises(ConfigError, match=says):
            listen_tcp(host, port)


def test_on_one_host_a_socket_has_a_name_until_it_is_closed(socket_dir: Path) -> None:
    sockets = toolkit.LocalSocketFactory(str(socket_dir))
    listener = sockets.listen("sender s")
    (path,) = socket_dir.iterdir()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600, "its user's own"
    target = sockets.target(listener.address, "receiver r", "s")
    assert target == str(path)
    assert path.name == listener.address["socket"]
    with socket.socket(socket.AF_UNIX) as knocking:
        knocking.connect(target)
    listener.close()
    listener.close()
    assert list(socket_dir.iterdir()) == []


def test_a_name_could_be_no_other_path_and_leads_to_no_other_host(socket_dir: Path) -> None:
    sockets = toolkit.LocalSocketFactory(str(socket_dir))
    name = "weightlane-0123456789abcdef.sock"
    assert sockets.target({"socket": name, "host": host_identity()}, "r", "s") == str(socket_dir / name)
    with pytest.raises(TransportError, match="another host"):
        sockets.target({"socket": name, "host": "elsewhere"}, "r", "s")
    for other in (f"../{name}", f"/run/{name}", "", None, 5):
        with pytest.raises(ProtocolError, match="not the name of a socket"):
            sockets.target({"socket": other, "host": host_identity()}, "r", "s")
