"""One bucket's handshake over control connections, and its bytes where they travel there too. Public in `toolkit`."""

from __future__ import annotations

import select
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from ..channels.channel import Channel
from ..contract.engine import Bucket
from ..deadline import Deadline
from ..errors import ProtocolError
from ..runtime.lifecycle import Lifecycle
from .waiting import poll_until

_FIELDS = ("version", "index", "nbytes")


def choose(channels: Mapping[str, Channel], names: Iterable[str], life: Lifecycle) -> dict[str, Channel]:
    """The channels to `names`; `ProtocolError` when there is none to one of them."""
    names = list(names)
    if unknown := sorted(set(names) - set(channels)):
        raise ProtocolError(f"not connected to {', '.join(unknown)}.", part=life.part)
    return {name: channels[name] for name in names}


def announce(channels: Mapping[str, Channel], bucket: Bucket, deadline: Deadline, **details: Any) -> None:
    """[sender] Tell every receiver which bucket comes next. `details` is JSON data that `expect` returns on their side."""
    message = {**details, "version": bucket.version, "index": bucket.index, "nbytes": bucket.nbytes}
    for channel in channels.values():
        channel.send_json(message, deadline)


def expect(
    channel: Channel, bucket: Bucket, deadline: Deadline, *, progress: Callable[[], object] | None = None
) -> dict[str, Any]:
    """[receiver] Wait for the sender's announcement of exactly `bucket` and return it with its details.

    Raises `ProtocolError` when the sender announces another bucket, and tells the sender so; else as `Channel.receive`.
    `progress` is called every millisecond meanwhile, for libraries that move data only inside their own calls.
    """
    what = f"bucket {bucket.index} of version {bucket.version}"
    if progress is not None:
        _progress_until_readable({channel.peer: channel}, progress, deadline, what)
    offered = channel.receive_json(deadline, what)
    if [offered.get(field) for field in _FIELDS] != [bucket.version, bucket.index, bucket.nbytes]:
        refuse(
            channel,
            f"it waits for bucket {bucket.index} of version {bucket.version} with {bucket.nbytes} bytes",
            deadline,
        )
        raise ProtocolError(
            f"expected version {bucket.version}, bucket {bucket.index} of {bucket.nbytes} bytes, but the sender offers "
            + "{}, {} of {}.".format(*(offered.get(field) for field in _FIELDS)),
            part=channel.part,
            peer=channel.peer,
        )
    return offered


def refuse(channel: Channel, reason: str, deadline: Deadline) -> None:
    """[receiver] Answer an announcement with why the bucket is not taken, half a sentence; the sender raises `ProtocolError`."""
    channel.send_json({"refused": reason}, deadline)


def acknowledge(channel: Channel, bucket: Bucket, deadline: Deadline, **details: Any) -> None:
    """[receiver] Answer the announcement of `bucket`. `details` is JSON data for the sender's `await_acknowledgements`."""
    channel.send_json({**details, "version": bucket.version, "taken": bucket.index}, deadline)


def await_acknowledgements(
    channels: Mapping[str, Channel],
    bucket: Bucket,
    deadline: Deadline,
    *,
    progress: Callable[[], object] | None = None,
    aside: Callable[[str, Mapping[str, Any]], bool] | None = None,
) -> dict[str, dict[str, Any]]:
    """[sender] Wait until every receiver has acknowledged `bucket`; returns each one's answer with its details.

    Raises `ProtocolError` when one refuses it, `PeerLostError` as soon as one is gone, and `DeadlineExceededError` that names
    those still missing. `progress` as in `expect`. With `aside` receivers may say other things in between: it is called with the
    receiver's name and the message, and tells whether it was such a one.
    """
    answers: dict[str, dict[str, Any]] = {}
    what = f"bucket {bucket.index} of version {bucket.version} to be taken"
    while waiting := {name: channel for name, channel in channels.items() if name not in answers}:
        if progress is not None:
            ready = _progress_until_readable(waiting, progress, deadline, what)
        else:
            ready = _until_ready(waiting, select.POLLIN, deadline, what)
        for name in ready:
            answer = waiting[name].receive_json(deadline, "a complete acknowledgement")
            if aside is None or not aside(name, answer):
                answers[name] = checked_answer(answer, waiting[name], bucket)
            else:  # who talks without end must not put off the deadline
                deadline.check(what, part=waiting[name].part, peer=name)
    return answers


def send_payload(channels: Mapping[str, Channel], bucket: Bucket, deadline: Deadline) -> None:
    """[sender] Send the bytes of `bucket` (CPU memory) over every channel at once, each at its receiver's own speed.

    Returns once the operating system has everything; the receivers need not. Raises as `await_acknowledgements`.
    """
    left = {name: bucket.data.numpy().data for name in channels if bucket.nbytes}
    what = f"room to send bucket {bucket.index} of version {bucket.version}"
    while left:
        for name in _until_ready(
            {name: channels[name] for name in left}, select.POLLIN | select.POLLOUT, deadline, what
        ):
            sent = channels[name].send_some(left[name])
            if not sent:  # so it is ready because something can be read: the receiver refuses, or is gone
                checked_answer(channels[name].receive_json(deadline, "a complete answer"), channels[name], bucket)
                raise ProtocolError("took a bucket that was not sent completely.", part=channels[name].part, peer=name)
            left[name] = left[name][sent:]
            if not left[name]:
                del left[name]


def receive_payload(channel: Channel, bucket: Bucket, deadline: Deadline) -> None:
    """[receiver] Fill ``bucket.data`` (CPU memory) with what `send_payload` sends."""
    what = f"the rest of bucket {bucket.index} of version {bucket.version}"
    channel.receive_into(bucket.data.numpy().data, deadline, what)


def _until_ready(channels: Mapping[str, Channel], events: int, deadline: Deadline, what: str) -> list[str]:
    """The names of `channels` on which one of the `select.POLL*` `events` happened, or that are gone; at least one."""
    descriptors = {channel.fileno(): name for name, channel in channels.items()}
    life = next(iter(channels.values())).life
    ready = life.wait_until(dict.fromkeys(descriptors, events), deadline, what, ", ".join(channels))
    return [descriptors[descriptor] for descriptor in ready]


def _progress_until_readable(
    channels: Mapping[str, Channel], progress: Callable[[], object], deadline: Deadline, what: str
) -> list[str]:
    descriptors = {channel.fileno(): name for name, channel in channels.items()}
    life = next(iter(channels.values())).life
    readable: set[int] = set()

    def look() -> bool:
        progress()
        readable.update(life.wait(dict.fromkeys(descriptors, select.POLLIN), 0.0))
        return bool(readable)

    poll_until(look, life, deadline, what, peer=", ".join(channels))
    return [descriptors[descriptor] for descriptor in readable]


def checked_answer(answer: dict[str, Any], channel: Channel, bucket: Bucket) -> dict[str, Any]:
    """[sender] `answer`, or `ProtocolError` when it does not acknowledge `bucket`."""
    if answer.get("taken") != bucket.index or answer.get("version") != bucket.version:
        raise ProtocolError(
            f"bucket {bucket.index} of version {bucket.version} with {bucket.nbytes} bytes was not taken:"
            f" {answer.get('refused', answer)}.",
            part=channel.part,
            peer=channel.peer,
        )
    return answer
