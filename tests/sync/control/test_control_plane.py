"""The control plane: who gets in, what reaches whom, what is left of old sessions, how the end of a coordinator is noticed."""

from __future__ import annotations

import contextlib
import gc
import os
import select
import shutil
import signal
import socket
import struct
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from sessions import never, soon
from waiting import HANG_S, wait_until

from weightlane.ckpt_engines import (
    ClosedError,
    Deadline,
    DeadlineExceededError,
    PeerLostError,
    ProtocolError,
    WeightlaneError,
)
from weightlane.ckpt_engines.channels.mac import new_secret
from weightlane.sync import Manifest, Rendezvous, RendezvousAddress, SyncConfig, TensorSpec
from weightlane.sync.control.hub.connection import ControlConnection
from weightlane.sync.control.hub.frames import Frame, Kind
from weightlane.sync.control.hub.handshake import dial
from weightlane.sync.control.messages import Abort, Committed, Stop
from weightlane.sync.control.tensor_lists import TensorLists
from weightlane.sync.send.agreement.rank_agreement import Interrupt, RankAgreement

NAMES = [f"t-{rank}" for rank in range(3)]


def raised_by(call: Callable[[], Any]) -> tuple[threading.Thread, list[WeightlaneError]]:
    """Run `call` on a thread of its own; what it raises."""
    errors: list[WeightlaneError] = []

    def run() -> None:
        try:
            call()
        except WeightlaneError as error:
            errors.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread, errors


@pytest.fixture
def member(rendezvous: Rendezvous) -> Iterator[Rendezvous]:
    joined = Rendezvous.join(rendezvous.address)
    yield joined
    joined.close()


# -- who gets in --------------------------------------------------------------------------------------------------------


def test_who_does_not_know_the_secret_is_no_member_and_disturbs_nobody(
    rendezvous: Rendezvous, member: Rendezvous
) -> None:
    address = rendezvous.address
    with pytest.raises((ProtocolError, PeerLostError)) as caught:
        Rendezvous.join(RendezvousAddress(address.host, address.port, new_secret()))
    assert caught.value.peer == "coordinator"
    member.mailbox("s").put("key", 1)
    assert rendezvous.mailbox("s").get("key", soon()) == 1


def test_a_program_that_took_over_the_port_is_not_believed() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = RendezvousAddress("127.0.0.1", listener.getsockname()[1], new_secret())

        def serve() -> None:
            sock, _ = listener.accept()
            with sock:
                sock.sendall(b"WLC1" + b"0" * 40 + b"0" * 64)
                sock.recv(1000)

        threading.Thread(target=serve, daemon=True).start()
        with pytest.raises(ProtocolError, match="does not know this run's secret"):
            Rendezvous.join(address)


def test_nobody_listens_there_is_said_at_once() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    with pytest.raises(PeerLostError, match="cannot connect"):
        Rendezvous.join(RendezvousAddress("127.0.0.1", port, new_secret()))


def test_what_is_not_signed_ends_its_own_connection_and_no_other(rendezvous: Rendezvous, member: Rendezvous) -> None:
    address = rendezvous.address
    sock, _ = dial(address.host, address.port, address.secret, soon())
    sock.setblocking(True)
    sock.settimeout(HANG_S)
    with sock:
        sock.sendall((50).to_bytes(4, "little") + b"\0" * 50)
        assert sock.recv(1) == b"", "the hub hangs up"
    member.post("coordinator", Stop())
    assert rendezvous.inbox("coordinator").get(soon()) == Stop()


FULL = """
import sys
from weightlane.ckpt_engines import TransportError
from weightlane.sync import Rendezvous
from weightlane.sync.control.messages import Stop
host = Rendezvous.host()
print(host.address.port, host.address.secret, flush=True)
sys.stdin.readline()
"""


def test_one_participant_too_many_is_told_so_and_the_others_stay() -> None:
    with subprocess.Popen(
        ["sh", "-c", 'ulimit -n 40; exec "$0" -c "$1"', sys.executable, FULL],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        port, secret = process.stdout.readline().split()
        address = RendezvousAddress("127.0.0.1", int(port), secret)
        joined: deque[Rendezvous] = deque()
        with pytest.raises(ConnectionError, match=r"no file descriptor left.*ulimit"):
            joined.extend(iter(lambda: Rendezvous.join(address), None))
        assert 10 < len(joined) < 40
        joined[0].mailbox("s").put("key", "value")
        assert joined[-1].mailbox("s").get("key", soon()) == "value"
        joined.pop().close()
        wait_until(lambda: bool(_joined(address)), "room for another one")
        process.stdin.close()


def _joined(address: RendezvousAddress) -> Rendezvous | None:
    try:
        return Rendezvous.join(address)
    except ConnectionError:
        return None


# -- what reaches whom --------------------------------------------------------------------------------------------------


def test_messages_come_in_their_order_and_posting_waits_for_no_reader(rendezvous: Rendezvous) -> None:
    address = rendezvous.address
    reader = Rendezvous.join(address)
    inbox = reader.inbox("r")
    reader.mailbox("s").put("ready", True)
    rendezvous.mailbox("s").get("ready", soon())
    texts = ["short", "x" * (1 << 22), "y" * 20_000] * 6
    for number, text in enumerate(texts):
        error = {"message": text}
        rendezvous.post("r", Abort(session="s", version=number, error=error, disconnect=False))
    came = [inbox.get(soon()) for _ in texts]
    assert [message.version for message in came] == list(range(len(texts)))  # type: ignore[union-attr]
    assert [message.error["message"] for message in came] == texts  # type: ignore[union-attr]


def test_a_member_that_does_not_read_gets_everything_later(rendezvous: Rendezvous) -> None:
    address = rendezvous.address
    sock, keys = dial(address.host, address.port, address.secret, soon())
    came: list[Frame] = []
    listening = ControlConnection(sock, keys, came.append, lambda _: None)
    listening.send(Frame(Kind.LISTEN, 0, "lazy", b""))  # sends, and does not read yet
    listening.send(Frame(Kind.PUT, 0, "s\nready", b"1"))
    rendezvous.mailbox("s").get("ready", soon())
    message = Abort(session="s", version=1, error={"message": os.urandom(1 << 20).hex()}, disconnect=False)
    for _ in range(20):
        rendezvous.post("lazy", message)
    assert select.select([sock], [], [], HANG_S)[0]
    listening.start()
    wait_until(lambda: len(came) == 20, "messages")
    assert len({frame.payload for frame in came}) == 1


def test_the_coordinator_gets_what_was_posted_before_it_was_there_and_nobody_else_does(
    rendezvous: Rendezvous, member: Rendezvous
) -> None:
    for name in ("coordinator", "r"):
        member.post(name, Committed(session="s", version=1))
    member.mailbox("s").put("done", 1)
    rendezvous.mailbox("s").get("done", soon())
    assert rendezvous.inbox("r").get_nowait() is None, "of another incarnation"
    assert rendezvous.inbox("coordinator").get(soon()) == Committed(session="s", version=1)


def test_a_message_for_many_is_encoded_once(rendezvous: Rendezvous, monkeypatch: pytest.MonkeyPatch) -> None:
    encoded = []

    def encode(message: Any) -> bytes:
        encoded.append(message)
        return b'{"type": "stop"}'

    monkeypatch.setattr("weightlane.sync.control.rendezvous.encode", encode)
    inboxes = [rendezvous.inbox(f"r-{number}") for number in range(50)]
    rendezvous.post_all([inbox.name for inbox in inboxes], Stop())
    assert [inbox.get(soon()) for inbox in inboxes] == [Stop()] * 50
    assert len(encoded) == 1


def test_whoever_waits_for_readers_hears_when_they_have_read_and_does_not_wait_for_the_dead(
    rendezvous: Rendezvous,
) -> None:
    readers = [Rendezvous.join(rendezvous.address) for _ in range(3)]
    inboxes = [reader.inbox(f"r-{number}") for number, reader in enumerate(readers)]
    for number, reader in enumerate(readers):
        reader.mailbox("s").put(str(number), 1)
        rendezvous.mailbox("s").get(str(number), soon())
    names = [inbox.name for inbox in inboxes]
    rendezvous.post_all(names, Stop())
    assert rendezvous.wait_until_read(names, Deadline.after(0.05)) == names
    threads = [raised_by(lambda inbox=inbox: (inbox.get(soon()), inbox.get(soon())))[0] for inbox in inboxes[:2]]
    readers[2].close()
    assert rendezvous.wait_until_read(names, never()) == []
    rendezvous.post_all(names[:2], Stop())
    for thread in threads:
        thread.join(HANG_S)
        assert not thread.is_alive()


def test_a_forked_process_leaves_its_parents_connections_alone(rendezvous: Rendezvous, member: Rendezvous) -> None:
    if (child := os.fork()) == 0:
        member.close()
        rendezvous.close()
        gc.collect()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    member.mailbox("s").put("key", 1)
    assert rendezvous.mailbox("s").get("key", soon()) == 1


def test_when_the_hub_is_closed_everybody_who_waits_hears_of_it_and_the_thread_ends() -> None:
    host = Rendezvous.host()
    joined = Rendezvous.join(host.address)
    inbox = joined.inbox("r")
    waits: list[Callable[[], Any]] = [inbox.get, lambda: joined.mailbox("s").get("key", never())]
    waiting = [raised_by(wait) for wait in waits]
    host.close()
    for thread, errors in waiting:
        thread.join(HANG_S)
        (error,) = errors
        assert isinstance(error, ClosedError)
        assert error.peer == "coordinator"
    with pytest.raises(ClosedError):
        inbox.get()
    with pytest.raises(ClosedError):
        joined.mailbox("s").put("key", 1)


def test_what_nobody_refers_to_any_more_ends_wherever_garbage_is_collected() -> None:
    host = Rendezvous.host()
    hub, joined = host._hub, Rendezvous.join(host.address)
    connection = joined._client.send.__self__  # type: ignore[attr-defined]
    with (
        hub._lock,
        hub.mailboxes._lock,
        connection._turn,
    ):  # the collector may run while this very thread is in the hub, or sends
        del joined, host
        gc.collect()
    wait_until(lambda: connection._ended and hub._listener._sock.fileno() < 0, "end of both")


def value_counts(rendezvous: Rendezvous) -> dict[str, int]:
    """How many values the hub keeps in each scope."""
    scopes = list(rendezvous._hub.mailboxes._scopes.items())
    return {name: len(scope.values) for name, scope in scopes if scope.values}


# -- mailboxes and sessions ----------------------------------------------------------------------------------------------


def test_a_value_wakes_whoever_waits_for_it_and_waiting_ends_by_its_deadline(
    rendezvous: Rendezvous, member: Rendezvous
) -> None:
    scopes, got = rendezvous._hub.mailboxes._scopes, list[Any]()
    thread, _ = raised_by(lambda: got.append(member.mailbox("s").get("key", soon())))
    wait_until(lambda: "s" in scopes and bool(scopes["s"].waits), "wait")
    rendezvous.mailbox("s").put("key", {"long": "x" * 100_000})
    thread.join(HANG_S)
    assert got == [{"long": "x" * 100_000}]
    with pytest.raises(DeadlineExceededError, match="'other' in mailbox s"):
        member.mailbox("s").get("other", Deadline.after(0.02))
    wait_until(lambda: not scopes["s"].waits, "nobody to wait any more")
    member.mailbox("s").delete("key")
    wait_until(lambda: not value_counts(rendezvous), "deletion")


def test_an_answer_that_comes_too_late_is_not_taken_for_another_one(
    rendezvous: Rendezvous, monkeypatch: pytest.MonkeyPatch
) -> None:
    mailbox, answer = rendezvous.mailbox("s"), rendezvous._hub.mailboxes.answer

    def put_before_it_is_called_off(member: Any, frame: Frame) -> None:
        if frame.kind == Kind.CANCEL:
            mailbox.put("key", "x" * 100_000)
        answer(member, frame)

    monkeypatch.setattr(rendezvous._hub.mailboxes, "answer", put_before_it_is_called_off)
    with pytest.raises(DeadlineExceededError):
        mailbox.get("key", Deadline.after(0.02))
    assert mailbox.get("key", soon()) == "x" * 100_000


def test_of_a_session_that_is_over_nothing_is_left_and_nobody_waits(rendezvous: Rendezvous, member: Rendezvous) -> None:
    store = rendezvous.store("gather-group/s-1")
    store.set("rank", "0")
    rendezvous.store("gather-group/s-2").set("rank", "0")
    scopes = ["plan/s-1", "engine/s-1-0", "deltas/s-1/7", "plan/s-12", "plan/s-2"]
    for scope in scopes:
        member.mailbox(scope).put("key", 1)
        assert rendezvous.mailbox(scope).get("key", soon()) == 1
    thread, errors = raised_by(lambda: member.mailbox("links/s-1").get("key", never()))
    wait_until(lambda: "links/s-1" in rendezvous._hub.mailboxes._scopes, "wait")
    rendezvous.forget_session("s-1")
    thread.join(HANG_S)
    assert isinstance(errors[0], ClosedError)
    assert set(value_counts(rendezvous)) == {"plan/s-12", "plan/s-2"}
    member.mailbox("plan/s-1").put("late", 1)
    with pytest.raises(ClosedError, match="the session of mailbox plan/s-1 is over"):
        member.mailbox("plan/s-1").get("late", never())
    assert set(value_counts(rendezvous)) == {"plan/s-12", "plan/s-2"}
    assert rendezvous._hub.torch_store._opened[0].list_keys() == ["gather-group/s-2/rank"]


# -- ranks that agree ----------------------------------------------------------------------------------------------------


def talks(rendezvous: Rendezvous) -> list[RankAgreement]:
    return [RankAgreement(rendezvous.mailbox("agreement/s"), NAMES, rank) for rank in range(3)]


def test_ranks_hear_all_of_one_another_by_two_messages_each_and_old_versions_go(rendezvous: Rendezvous) -> None:
    ranks = talks(rendezvous)
    kept = []
    for version in range(1, 9):
        before, _ = rendezvous.traffic
        for rank, talk in enumerate(ranks):
            talk.say("deltas", version, [version, rank])
        for talk in ranks:
            assert list(talk.hear("deltas", version, soon(), Interrupt()).items()) == [
                (name, [version, rank]) for rank, name in enumerate(NAMES)
            ]
        assert rendezvous.traffic[0] - before <= 4 * len(ranks), "say, ask, answer, and one to forget"
        kept.append(sum(value_counts(rendezvous).values()))
    assert kept[-1] == kept[2], "it grows with every version"


def test_a_rank_that_says_nothing_is_named(rendezvous: Rendezvous) -> None:
    first, _, third = talks(rendezvous)
    first.say("deltas", 1, None)
    third.say("deltas", 1, None)
    with pytest.raises(DeadlineExceededError, match="the deltas of version 1") as caught:
        first.hear("deltas", 1, Deadline.after(0.05), Interrupt())
    assert caught.value.peer == "t-1"


def test_a_rank_hears_the_others_no_longer_than_it_wants(rendezvous: Rendezvous) -> None:
    first, second, _ = talks(rendezvous)
    superseded, other = Interrupt(), Interrupt()
    thread, errors = raised_by(lambda: first.hear("deltas", 1, never(), superseded))
    wait_until(lambda: bool(superseded._waits), "rank that hears")
    other.set()
    assert superseded._waits, "another version is superseded"
    superseded.set()
    thread.join(HANG_S)
    closed, others = raised_by(lambda: second.hear("deltas", 1, never(), Interrupt()))
    wait_until(lambda: bool(second._session_over._waits), "rank that hears")
    second.close()
    closed.join(HANG_S)
    assert [type(error) for error in (*errors, *others)] == [ClosedError, ClosedError]
    for rank, interrupt in ((first, superseded), (second, Interrupt())):
        with pytest.raises(ClosedError):
            rank.hear("deltas", 1, never(), interrupt)


def test_others_than_the_ranks_are_not_listened_to(rendezvous: Rendezvous) -> None:
    first, second, _ = talks(rendezvous)
    first.say("deltas", 1, None)
    second.say("deltas", 1, None)
    rendezvous.mailbox("agreement/s/deltas/1").put("t-9", None)
    with pytest.raises(ProtocolError, match="no trainer ranks speak of it: t-9"):
        first.hear("deltas", 1, soon(), Interrupt())


# -- manifests by reference ----------------------------------------------------------------------------------------------


def manifest(version: int = 0) -> Manifest:
    specs = tuple(TensorSpec(f"w.{number}", (3, number), torch.float32) for number in range(40))
    return Manifest(version, specs, 1024)


def test_a_list_of_tensors_is_sent_once_for_a_session(rendezvous: Rendezvous) -> None:
    trainer, rollout, model = TensorLists(), TensorLists(), manifest()
    for session in ("s-1", "s-2"):
        board = rendezvous.mailbox(f"tensors/{session}")
        for version in range(3):
            offered = model.as_version(version, "")
            before = rendezvous.traffic
            plain = trainer.referred_to(offered.to_plain(), board, session)
            assert isinstance(plain["tensors"], str)
            assert Manifest.from_plain(rollout.looked_up(plain, board, soon())) == offered
            assert version == 0 or rendezvous.traffic == before, "it is there already"
        assert value_counts(rendezvous)[f"tensors/{session}"] == 1


def test_a_list_that_is_not_what_its_digest_says_is_refused(rendezvous: Rendezvous) -> None:
    board = rendezvous.mailbox("tensors/s")
    plain = TensorLists().referred_to(manifest().to_plain(), board, "s")
    board.put(plain["tensors"], [])
    with pytest.raises(ProtocolError, match="not the one that the manifest refers to"):
        TensorLists().looked_up(plain, board, soon())
    with pytest.raises(DeadlineExceededError):
        TensorLists().looked_up(plain | {"tensors": "0" * 64}, board, Deadline.after(0.02))


def test_another_version_of_a_manifest_is_what_it_would_be_if_it_were_made_anew() -> None:
    first = manifest(1)
    assert first.bucket_count
    assert first.as_version(7, "x") == replace(first, version=7, identity="x")
    assert first.version == 1
    same = Manifest.from_plain(first.as_version(7, "x").to_plain(), first)
    assert same == replace(first, version=7, identity="x")
    for changed in ({"bucket_bytes": 2048}, {"checksummed": False}, {"lasting": True}, {"quantised": "fp8"}):
        other = replace(first, version=7, **changed)
        assert Manifest.from_plain(other.to_plain(), first) == other


# -- a coordinator that is silent ----------------------------------------------------------------------------------------

SILENT = """
import sys
from weightlane.sync import Rendezvous
host = Rendezvous.host(silence_s=1.0)
print(host.address.port, host.address.secret, flush=True)
sys.stdin.readline()
"""


def test_a_coordinator_that_is_only_busy_is_not_taken_for_a_dead_one(children: Any) -> None:
    process = children.start(["-c", SILENT], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    port, secret = process.stdout.readline().split()
    with contextlib.closing(Rendezvous.join(RendezvousAddress("127.0.0.1", int(port), secret))) as member:
        process.send_signal(signal.SIGSTOP)
        member.mailbox("s").put("key", 1)
        sock = member._client.send.__self__._sock  # type: ignore[attr-defined]
        # A host that has vanished, and acknowledges nothing, is waited for no longer than one second.
        wait_until(lambda: acknowledged_after_ms(sock) > 3000, "answers of the host's kernel to keep-alive probes")
        process.send_signal(signal.SIGCONT)
        assert member.mailbox("s").get("key", soon()) == 1


def acknowledged_after_ms(sock: socket.socket) -> int:
    """How long after the last data that was sent on `sock` the last acknowledgement came."""
    info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 60)
    data_sent_ms_ago, _, _, acknowledged_ms_ago = struct.unpack_from("4I", info, 44)  # see linux/tcp.h
    return int(data_sent_ms_ago - acknowledged_ms_ago)


@pytest.mark.parametrize(("deadline_s", "silence_s"), [(60.0, 20.0), (5.0, 5.0), (0.5, 2.0)])
def test_a_vanished_host_is_noticed_within_a_sync(deadline_s: float, silence_s: float) -> None:
    assert SyncConfig(deadline_s=deadline_s).silence_s == silence_s


# -- a coordinator that vanishes -----------------------------------------------------------------------------------------

VANISHING = Path(__file__).parent / "vanishing_coordinator.py"
PROBE = "ip link add wl0 type veth peer name wl1 && ip link set wl0 up"


@pytest.fixture
def own_network() -> str:
    """How to run a program in a network of its own; skips, with the reason, where there is none."""
    if (unshare := shutil.which("unshare")) is None or shutil.which("ip") is None:
        pytest.skip("unshare, of util-linux, or ip, of iproute2, not found")
    done = subprocess.run([unshare, "--net", "sh", "-c", PROBE], capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"this system makes no links: {done.stderr.strip()}")
    return unshare


def test_a_coordinator_whose_host_vanishes_without_a_word_is_noticed_by_everybody(own_network: str) -> None:
    done = subprocess.run(
        [own_network, "--net", sys.executable, str(VANISHING)],
        capture_output=True,
        text=True,
        timeout=2 * HANG_S,  # it ends by itself after one
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    said = done.stdout.splitlines()
    assert len(said) == 4, done.stdout
    for line in said:
        assert "ClosedError" in line
        assert "coordinator at 10.77.0.2" in line
