"""A coordinator that is silent, busy or gone with its host is noticed in time, and not before."""

from __future__ import annotations

import contextlib
import shutil
import signal
import socket
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from sessions import soon
from waiting import HANG_S, wait_until

from weightlane.sync import Rendezvous, RendezvousAddress, SyncConfig

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
