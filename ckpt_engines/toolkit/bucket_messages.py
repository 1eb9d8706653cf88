"""Messages about one bucket over the channels, and the bucket's bytes. Public in `toolkit`."""

from __future__ import annotations

import select
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from ..channels.channel import Channel
from ..contract.bucket import Bucket
from ..errors import ProtocolError
from ..waits import Deadline, Lifecycle, poll_until

_FIELDS = ("version", "index", "nbytes")


def choose(channels: Mapping[str, Channel], names: Iterable[str], life: Lifecycle) -> dict[str, Channel]:
    """Return the channels to the peers in `names`. Raises `ProtocolError` when there is no channel to one of them."""
    names = list(names)
    if unknown := sorted(set(names) - set(channels)):
        raise ProtocolError(f"not connected to {', '.join(unknown)}.", part=life.part)
    return {name: channels[name] for name in names}


def announce(channels: Mapping[str, Channel], bucket: Bucket, deadline: Deadline, **details: Any) -> None:
    """[sender] Tell every receiver that `bucket` is next. On the receiver's side, `expect` returns `details`, JSON data."""
    message = {**details, "version": bucket.version, "index": bucket.index, "nbytes": bucket.nbytes}
    for channel in channels.values():
        channel.send_json(message, deadline)


def expect(
    channel: Channel, bucket: Bucket, deadline: Deadline, *, progress: Callable[[], object] | None = None
) -> dict[str, Any]:
    """[receiver] Wait for the sender's announcement of exactly `bucket`, and return it with its details.

    `progress` is called every millisecond meanwhile, for libraries that move data only inside their own calls.

    Raises `ProtocolError` when the sender announces another bucket, and makes the sender's wait for an answer raise it, too;
    otherwise as `Channel.send`.
    """
    what = str(bucket)
    if progress is not None:
        _ready({channel.peer: channel}, select.POLLIN, deadline, what, progress)
    announced = channel.receive_json(deadline, what)
    if [announced.get(field) for field in _FIELDS] != [bucket.version, bucket.index, bucket.nbytes]:
        refuse(channel, f"it waits for {what} with {bucket.nbytes} bytes", deadline)
        raise ProtocolError(
            f"expected version {bucket.version}, bucket {bucket.index} of {bucket.nbytes} bytes, but the sender offers "
            + "{}, {} of {}.".format(*(announced.get(field) for field in _FIELDS)),
            part=channel.part,
            peer=channel.peer,
        )
    return announced


def refuse(channel: Channel, reason: str, deadline: Deadline) -> None:
    """[receiver] Refuse an announced bucket for a `reason`, such as ``"it has no room"``; the sender raises `ProtocolError`."""
    channel.send_json({"refused": reason}, deadline)


def acknowledge(channel: Channel, bucket: Bucket, deadline: Deadline, **details: Any) -> None:
    """[receiver] Acknowledge an announced `bucket`. `await_acknowledgements` returns `details`, JSON data, to the sender."""
    channel.send_json({**details, "version": bucket.version, "taken": bucket.index}, deadline)


def await_acknowledgements(
    channels: Mapping[str, Channel],
    bucket: Bucket,
    deadline: Deadline,
    *,
    progress: Callable[[], object] | None = None,
    aside: Callable[[str, Mapping[str, Any]], bool] | None = None,
) -> dict[str, dict[str, Any]]:
    """[sender] Wait until every receiver has acknowledged `bucket`, and return each one's answer with its details.

    Args:
        channels: Channels to the receivers, by name.
        bucket: Bucket that was announced.
        deadline: Time by which all receivers must answer.
        progress: Called every millisecond meanwhile, as in `expect`.
        aside: For engines whose receivers may send other messages in between. It is called with the receiver's name and the
            message, and returns whether it handled the message, which is then no answer.

    Raises:
        ProtocolError: A receiver refuses the bucket.
        PeerLostError: A receiver is gone.
        DeadlineExceededError: It names the receivers that have not answered.
        ClosedError: The half was closed.
    """
    answers: dict[str, dict[str, Any]] = {}
    what = f"{bucket} to be taken"
    while waiting := {name: channel for name, channel in channels.items() if name not in answers}:
        for name in _ready(waiting, select.POLLIN, deadline, what, progress):
            answer = waiting[name].receive_json(deadline, "a complete acknowledgement")
            if aside is None or not aside(name, answer):
                answers[name] = checked_answer(answer, waiting[name], bucket)
            else:  # a receiver that sends without end would otherwise keep the wait from noticing the deadline
                deadline.check(what, part=waiting[name].part, peer=name)
    return answers


def checked_answer(answer: dict[str, Any], channel: Channel, bucket: Bucket) -> dict[str, Any]:
    """[sender] Return `answer`. Raises `ProtocolError` when it does not acknowledge `bucket`."""
    if answer.get("taken") != bucket.index or answer.get("version") != bucket.version:
        raise ProtocolError(
            f"{bucket} with {bucket.nbytes} bytes was not taken: {answer.get('refused', answer)}.",
            part=channel.part,
            peer=channel.peer,
        )
    return answer


def send_payload(channels: Mapping[str, Channel], bucket: Bucket, deadline: Deadline) -> None:
    """[sender] Send the bytes of `bucket` (CPU memory) over every channel at once, at the speed of each receiver.

    Returns when the operating system has all bytes, perhaps before the receivers have them. Raises as `await_acknowledgements`.
    """
    rest = {name: bucket.data.numpy().data for name in channels if bucket.nbytes}
    what = f"room to send {bucket}"
    while rest:
        unfinished = {name: channels[name] for name in rest}
        for name in _ready(unfinished, select.POLLIN | select.POLLOUT, deadline, what):
            channel = channels[name]
            sent = channel.send_some(rest[name])
            if not sent:  # the channel is ready to be read: the receiver refuses the bucket, or is gone
                checked_answer(channel.receive_json(deadline, "a complete answer"), channel, bucket)
                raise ProtocolError("took a bucket that was not sent completely.", part=channel.part, peer=name)
            rest[name] = rest[name][sent:]
            if not rest[name]:
                del rest[name]


def receive_payload(channel: Channel, bucket: Bucket, deadline: Deadline) -> None:
    """[receiver] Fill ``bucket.data`` (CPU memory) with the bytes that the sender's `send_payload` sends."""
    what = f"the rest of {bucket}"
    channel.receive_into(bucket.data.numpy().data, deadline, what)


def _ready(
    channels: Mapping[str, Channel],
    events: int,
    deadline: Deadline,
    what: str,
    progress: Callable[[], object] | None = None,
) -> list[str]:
    """Wait for one of the `select.POLL*` `events`, and return the names of the `channels` on which one happened; at least one."""
    interest = {channel.fileno(): events for channel in channels.values()}
    life = next(iter(channels.values())).life
    peers = ", ".join(channels)
    ready: set[int] = set()

    def look() -> bool:
        if progress is not None:
            progress()
        ready.update(life.wait(interest, 0.0))
        return bool(ready)

    if progress is None:
        ready = life.wait_until(interest, deadline, what, peers)
    else:
        poll_until(look, life, deadline, what, peer=peers)
    return [name for name, channel in channels.items() if channel.fileno() in ready]
