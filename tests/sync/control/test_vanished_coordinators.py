"""A coordinator that is silent, busy or gone with its host is noticed in time, and not before."""

from __future__ import annotations

import shutil
import socket
import struct
import subprocess
from contextlib import closing
from typing import Any

import pytest
from hub_calls import HubProcess, RemoteMembers
from sessions import soon
from waiting import wait_until

from weightlane.sync import Rendezvous, RendezvousAddress


def acknowledged_after_ms(sock: socket.socket) -> int:
    """How long after the last data that was sent on `sock` the last acknowledgement came."""
    info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 60)
    data_sent_ms_ago, _, _, acknowledged_ms_ago = struct.unpack_from("4I", info, 44)  # see linux/tcp.h
    return int(data_sent_ms_ago - acknowledged_ms_ago)


def test_a_coordinator_that_is_only_busy_is_not_taken_for_a_dead_one(start: Any) -> None:
    hub = start(HubProcess)
    address = RendezvousAddress.from_plain(hub.call("host", "127.0.0.1", 1.0))
    with closing(Rendezvous.join(address)) as member:
        with hub.frozen():
            member.mailbox("s").put("key", 1)
            sock = member._client.send.__self__._sock  # type: ignore[attr-defined]
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
    hub = start(HubProcess, own_network=True)
    members = start(RemoteMembers, host=hub.pid)
    members.call("join", hub.call("host", RemoteMembers.THERE, 2.0))
    with hub.frozen():
        errors = members.call("lose_host")
    assert len(errors) == 4
    for error in errors:
        assert "ClosedError" in error
        assert f"coordinator at {RemoteMembers.THERE}" in error
