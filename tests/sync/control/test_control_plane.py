"""The control plane: who gets in, what reaches whom, how ranks agree, what is left of old sessions, and who notices its end."""

from __future__ import annotations

import gc
import shutil
import socket
import struct
import subprocess
import threading
from collections import deque
from collections.abc import Callable
from contextlib import closing
from typing import Any

import pytest
from hub_calls import HubProcess, RemoteMembers, raised_by, value_counts
from sessions import never, soon
from waiting import HANG_S, wait_until

from weightlane.ckpt_engines import ClosedError, Deadline, DeadlineExceededError, PeerLostError, ProtocolError
from weightlane.ckpt_engines.channels.channel import Frame, new_secret
from weightlane.sync import Rendezvous, RendezvousAddress
from weightlane.sync.control.messages import Abort, Committed, Kind
from weightlane.sync.send.rank_agreement import RankAgreement


def test_who_does_not_know_the_secret_is_no_member_and_disturbs_nobody(
    rendezvous: Rendezvous, member: Rendezvous
) -> None:
    address = rendezvous.address
    with pytest.raises((ProtocolError, PeerLostError)) as caught:
        Rendezvous.join(RendezvousAddress(address.host, address.port, new_secret()))
    assert caught.value.peer == "coordinator"
    member.mailbox("s").put("key", 1)
    assert rendezvous.mailbox("s").get("key", soon()) == 1


def test_one_participant_too_many_is_told_so_and_the_others_stay(start: Any) -> None:
    address = RendezvousAddress.from_plain(start(HubProcess, descriptors=40).is_ready().call("host"))
    joined: deque[Rendezvous] = deque()
    with pytest.raises(ConnectionError, match=r"no file descriptor left.*ulimit"):
        joined.extend(iter(lambda: Rendezvous.join(address), None))
    assert 10 < len(joined) < 40
    joined[0].mailbox("s").put("key", "value")
    assert joined[-1].mailbox("s").get("key", soon()) == "value"
    joined.pop().close()
    wait_until(lambda: bool(_joined(address)), "room for another one")


def _joined(address: RendezvousAddress) -> Rendezvous | None:
    try:
        return Rendezvous.join(address)
    except ConnectionError:
        return None


# -- what reaches whom --------------------------------------------------------------------------------------------------


def test_messages_come_in_their_order_and_posting_waits_for_no_reader(rendezvous: Rendezvous) -> None:
    address = rendezvous.address
    reader = Rendezvous.join(address)
    reader.listen("r")
    reader.mailbox("s").put("ready", True)
    rendezvous.mailbox("s").get("ready", soon())
    texts = ["short", "x" * (1 << 22), "y" * 20_000] * 2
    for number, text in enumerate(texts):
        error = {"message": text}
        rendezvous.post("r", Abort(session="s", version=number, error=error, disconnect=False))
    came = [reader.receive(soon()) for _ in texts]
    assert [message.version for message in came] == list(range(len(texts)))  # type: ignore[union-attr]
    assert [message.error["message"] for message in came] == texts  # type: ignore[union-attr]


def test_the_coordinator_gets_what_was_posted_before_it_was_there_and_nobody_else_does(
    rendezvous: Rendezvous, member: Rendezvous
) -> None:
    for name in ("coordinator", "r"):
        member.post(name, Committed(session="s", version=1))
    member.mailbox("s").put("done", 1)
    rendezvous.mailbox("s").get("done", soon())
    rendezvous.listen("r")
    assert rendezvous.receive(Deadline.after(0)) is None, "of another incarnation"
    rendezvous.listen("coordinator")
    assert rendezvous.receive(soon()) == Committed(session="s", version=1)


def test_whoever_waits_for_readers_to_leave_is_told_who_stays(rendezvous: Rendezvous) -> None:
    readers = [Rendezvous.join(rendezvous.address) for _ in range(3)]
    names = [f"r-{number}" for number in range(3)]
    for number, reader in enumerate(readers):
        reader.listen(names[number])
        reader.mailbox("s").put(str(number), 1)
        rendezvous.mailbox("s").get(str(number), soon())
    assert rendezvous.wait_until_unread(names, Deadline.after(0.05)) == names
    readers[2].close()
    assert rendezvous.wait_until_unread(names[2:], never()) == []
    assert rendezvous.wait_until_unread(names, Deadline.after(0.05)) == names[:2]
    for reader in readers:
        reader.close()
    assert rendezvous.wait_until_unread(names, never()) == []


def test_when_the_hub_is_closed_everybody_who_waits_hears_of_it_and_the_thread_ends() -> None:
    host = Rendezvous.host()
    joined = Rendezvous.join(host.address)
    joined.listen("r")
    waits: list[Callable[[], Any]] = [joined.receive, lambda: joined.mailbox("s").get("key", never())]
    waiting = [raised_by(wait) for wait in waits]
    host.close()
    for thread, errors in waiting:
        thread.join(HANG_S)
        (error,) = errors
        assert isinstance(error, ClosedError)
        assert error.peer == "coordinator"
    with pytest.raises(ClosedError):
        joined.receive()
    with pytest.raises(ClosedError):
        joined.mailbox("s").put("key", 1)


def test_members_know_their_address_and_joining_ends_by_its_deadline_also_while_a_name_server_hangs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    answered = threading.Event()
    with closing(Rendezvous.host("::1")) as host, closing(Rendezvous.join(host.address)) as joined:
        assert host.local_host == joined.local_host == "::1"
        monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: answered.wait(HANG_S))
        with pytest.raises(DeadlineExceededError, match="the address of ::1"):
            Rendezvous.join(host.address, timeout_s=0.05)
        answered.set()


def test_a_hub_and_a_member_that_nobody_refers_to_end_wherever_garbage_is_collected() -> None:
    host = Rendezvous.host()
    hub, joined = host._hub, Rendezvous.join(host.address)
    connection = joined._send.__self__  # type: ignore[attr-defined]
    with (
        hub._lock,
        hub.mailboxes._lock,
        connection._turn,
    ):  # the collector may run on the thread that holds any of these
        del joined, host
        gc.collect()
    wait_until(lambda: connection._ended and hub._listener.socket.fileno() < 0, "end of both")


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
    mailbox, mailboxes = rendezvous.mailbox("s"), rendezvous._hub.mailboxes
    answer = mailboxes.answer

    def put_before_it_is_cancelled(member: Any, frame: Frame) -> None:
        if frame.kind == Kind.CANCEL:
            mailbox.put("key", "x" * 100_000)
        answer(member, frame)

    monkeypatch.setattr(mailboxes, "answer", put_before_it_is_cancelled)
    with pytest.raises(DeadlineExceededError):
        mailbox.get("key", Deadline.after(0.02))
    assert mailbox.get("key", soon()) == "x" * 100_000


def test_of_a_session_that_is_over_nothing_is_left_and_nobody_waits(rendezvous: Rendezvous, member: Rendezvous) -> None:
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


NAMES = [f"t-{rank}" for rank in range(3)]


def talks(rendezvous: Rendezvous) -> list[RankAgreement]:
    return [RankAgreement(rendezvous.mailbox("agreement/s"), NAMES, rank) for rank in range(3)]


def test_ranks_hear_one_another_by_two_messages_each_old_versions_go_and_a_silent_rank_is_named(
    rendezvous: Rendezvous,
) -> None:
    ranks = talks(rendezvous)
    kept = []
    for version in range(1, 9):
        before, _ = rendezvous.traffic
        for rank, talk in enumerate(ranks):
            talk.publish("deltas", (version, 1), [version, rank])
        for talk in ranks:
            assert list(talk.collect("deltas", (version, 1), soon()).items()) == [
                (name, [version, rank]) for rank, name in enumerate(NAMES)
            ]
        assert rendezvous.traffic[0] - before <= 4 * len(ranks), "say, ask, answer, and one to forget"
        kept.append(sum(value_counts(rendezvous).values()))
    assert kept[-1] == kept[2], "it grows with every version"
    for talk in (ranks[0], ranks[2]):
        talk.publish("deltas", (9, 1), None)
    with pytest.raises(DeadlineExceededError, match="the deltas of version 9") as caught:
        ranks[0].collect("deltas", (9, 1), Deadline.after(0.05))
    assert caught.value.peer == "t-1"


def test_a_rank_hears_the_others_no_longer_than_it_wants(rendezvous: Rendezvous) -> None:
    first, second, _ = talks(rendezvous)
    superseded, hears_nobody = threading.Event(), first.give_up_over
    thread, errors = raised_by(lambda: first.collect("deltas", (1, 1), never(), superseded.is_set))
    wait_until(lambda: first.give_up_over != hears_nobody, "rank that hears")
    first.give_up_over()
    assert first.give_up_over != hears_nobody, "another version is superseded"
    superseded.set()
    first.give_up_over()
    thread.join(HANG_S)
    closed, others = raised_by(lambda: second.collect("deltas", (1, 1), never()))
    wait_until(lambda: second.give_up_over != hears_nobody, "rank that hears")
    second.close()
    closed.join(HANG_S)
    assert [type(error) for error in (*errors, *others)] == [ClosedError, ClosedError]
    for rank in (first, second):
        with pytest.raises(ClosedError):
            rank.collect("deltas", (1, 1), never(), superseded.is_set)
    wait_until(lambda: not rendezvous._hub.mailboxes._scopes, "end of the questions that nobody waits for")


# -- a coordinator that is silent, busy or gone with its host --------------------------------------------------------------


def acknowledged_after_ms(sock: socket.socket) -> int:
    """How long after the last data that was sent on `sock` the last acknowledgement came."""
    info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 60)
    data_sent_ms_ago, _, _, acknowledged_ms_ago = struct.unpack_from("4I", info, 44)  # see linux/tcp.h
    return int(data_sent_ms_ago - acknowledged_ms_ago)


def test_a_coordinator_that_is_only_busy_is_not_taken_for_a_dead_one(start: Any) -> None:
    hub = start(HubProcess).is_ready()
    address = RendezvousAddress.from_plain(hub.call("host", "127.0.0.1", 1.0))
    with closing(Rendezvous.join(address)) as member:
        with hub.frozen():
            member.mailbox("s").put("key", 1)
            sock = member._send.__self__.socket  # type: ignore[attr-defined]
            # A host that has vanished, and acknowledges nothing, is waited for no longer than one second.
            wait_until(lambda: acknowledged_after_ms(sock) > 3000, "answers of the host's kernel to keep-alive probes")
        assert member.mailbox("s").get("key", soon()) == 1


PROBE = "ip link add wl0 type veth peer name wl1 && ip link set wl0 up"


def test_a_coordinator_whose_host_vanishes_without_a_word_is_noticed_by_everybody(start: Any) -> None:
    if not all(map(shutil.which, ("unshare", "nsenter", "ip"))):
        pytest.skip("unshare or nsenter, of util-linux, or ip, of iproute2, not found")
    probe = subprocess.run(["unshare", "--net", "sh", "-c", PROBE], capture_output=True, text=True, check=False)
    if probe.returncode:
        pytest.skip(f"this system makes no links: {probe.stderr.strip()}")
    hub = start(HubProcess, own_network=True).is_ready()
    members = start(RemoteMembers, host=hub.pid).is_ready()
    members.call("join", hub.call("host", RemoteMembers.THERE, 2.0))
    with hub.frozen():
        errors = members.call("lose_host")
    assert len(errors) == 4
    for error in errors:
        assert "ClosedError" in error
        assert f"coordinator at {RemoteMembers.THERE}" in error
