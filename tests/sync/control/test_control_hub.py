"""The hub when things go wrong around it: no descriptors, silent strangers, answers that nobody waits for any more."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import closing

import pytest
from sessions import soon
from waiting import HANG_S, wait_until

from weightlane.ckpt_engines import ClosedError, ConfigError, Deadline, DeadlineExceededError
from weightlane.sync import Rendezvous
from weightlane.sync.control.hub import listener
from weightlane.sync.control.hub.frames import COORDINATOR, Frame, Kind
from weightlane.sync.control.hub.hub import ControlHub
from weightlane.sync.control.hub.mailboxes import Member
from weightlane.sync.send.agreement.rank_agreement import Interrupt, RankAgreement


@pytest.fixture
def rendezvous() -> Iterator[Rendezvous]:
    with closing(Rendezvous.host()) as hosted:
        yield hosted


@pytest.fixture
def member(rendezvous: Rendezvous) -> Iterator[Rendezvous]:
    with closing(Rendezvous.join(rendezvous.address)) as joined:
        yield joined


def waits(rendezvous: Rendezvous) -> int:
    """How many questions the hub still has to answer."""
    scopes = rendezvous._hub.mailboxes._scopes.values()
    return sum(len(asking) for scope in list(scopes) for asking in list(scope.waits.values()))


def test_a_hub_without_a_spare_descriptor_goes_on_listening(
    rendezvous: Rendezvous, monkeypatch: pytest.MonkeyPatch
) -> None:
    def none_left(*_: object, **__: object) -> socket.socket:
        raise OSError(24, "Too many open files")

    with monkeypatch.context() as patched:
        patched.setattr(listener.socket, "socket", none_left)
        rendezvous._hub._listener._refuse(OSError(24, "Too many open files"))
    with closing(Rendezvous.join(rendezvous.address)) as joined:
        joined.mailbox("s").put("key", 1)
        assert rendezvous.mailbox("s").get("key", soon()) == 1


def test_a_stranger_that_says_nothing_is_dismissed_when_another_one_comes(
    rendezvous: Rendezvous, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listener, "_PENDING_S", 0.0)
    with socket.create_connection((rendezvous.address.host, rendezvous.address.port), HANG_S) as silent:
        assert silent.recv(1000).startswith(b"WLC1")
        Rendezvous.join(rendezvous.address).close()
        assert silent.recv(1000) == b""


def test_what_came_before_the_coordinator_listened_comes_first() -> None:
    hub = ControlHub("127.0.0.1", 0, "secret", 20.0)
    heard: list[bytes] = []
    posting = threading.Thread(target=hub.post, args=([COORDINATOR], b"late"))

    def send(frame: Frame, _: object = None) -> None:
        heard.append(frame.payload)
        if frame.payload == b"first":
            posting.start()
            posting.join(0.2)  # it waits, or overtakes the second one

    hub.post([COORDINATOR], b"first")
    hub.post([COORDINATOR], b"second")
    hub.handle(Member(send), Frame(Kind.LISTEN, 0, COORDINATOR, b""))
    posting.join(HANG_S)
    assert heard == [b"first", b"second", b"late"]
    hub.close()


@pytest.mark.parametrize("where", ["the hub's process", "a member's"])
def test_the_hub_keeps_no_question_that_nobody_waits_for_any_more(
    rendezvous: Rendezvous, member: Rendezvous, where: str
) -> None:
    asking = member if where == "a member's" else rendezvous
    talk = RankAgreement(asking.mailbox("talk/s"), ["a", "b"], 0)
    superseded = Interrupt()
    superseded.set()
    for version in range(5):
        with pytest.raises(ClosedError):
            talk.hear("deltas", version, soon(), superseded)
    with pytest.raises(DeadlineExceededError, match="'key' in mailbox s"):
        asking.mailbox("s").get("key", Deadline.after(0.01))
    wait_until(lambda: waits(rendezvous) == 0, "end of the questions")
    assert not rendezvous._hub.mailboxes._scopes


def test_a_wait_for_readers_that_was_in_vain_leaves_no_mark(rendezvous: Rendezvous, member: Rendezvous) -> None:
    member.inbox("slow")
    wait_until(lambda: "slow" in rendezvous._hub._readers, "reader")
    assert rendezvous.wait_until_read(["slow"], Deadline.after(0.01)) == ["slow"]
    assert not rendezvous._hub._marks


def test_a_store_that_cannot_be_opened_is_said_to_whoever_asked(
    rendezvous: Rendezvous, member: Rendezvous, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(_: str) -> tuple[object, int]:
        raise ConfigError("there is no port left.")

    monkeypatch.setattr("weightlane.sync.control.hub.torch_store.host_store", fails)
    with pytest.raises(ClosedError, match="could not open a torch store: there is no port left"):
        member.store("group")
    member.mailbox("s").put("key", 1)
    assert rendezvous.mailbox("s").get("key", soon()) == 1, "the connection stays"


def test_who_waits_in_a_session_that_is_over_hears_which(rendezvous: Rendezvous) -> None:
    rendezvous.forget_session("s-1")
    with pytest.raises(ClosedError, match="session of mailbox plan/s-1 is over"):
        rendezvous.mailbox("plan/s-1").get("key", soon())
