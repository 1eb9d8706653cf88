"""Trainer ranks on two machines: network namespaces whose host name leads nowhere, as in many clusters."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys

import pytest
from waiting import HANG_S

from weightlane.ckpt_engines.engines.torch_distributed.interfaces import address_of_interface, interface_towards

RANK = f"""
import sys
if sys.argv[1] == "1":
    print("new network", flush=True)
    sys.stdin.readline()
import torch, torch.distributed as dist
from weightlane.trainer.engines.rank_collectives import join_ranks
join_ranks(int(sys.argv[1]), 2, ("10.77.0.1", 29500), torch.device("cpu"), {HANG_S})
total = torch.tensor([1.0 + int(sys.argv[1])])
dist.all_reduce(total)
print(total.item(), flush=True)
"""
FIRST = f"""
import subprocess, sys
second = subprocess.Popen(
    ["unshare", "--net", sys.executable, "-c", sys.argv[1], "1"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
)
try:
    second.stdout.readline()
    there = f"nsenter --target {{second.pid}} --net "
    for command in (
        "ip link set lo up",
        there + "ip link set lo up",
        "ip link add wl0 type veth peer name wl1",
        f"ip link set wl1 netns {{second.pid}}",
        "ip addr add 10.77.0.1/24 dev wl0",
        "ip link set wl0 up",
        there + "ip addr add 10.77.0.2/24 dev wl1",
        there + "ip link set wl1 up",
    ):
        subprocess.run(command.split(), check=True)
    second.stdin.write("\\n")
    second.stdin.flush()
    subprocess.run([sys.executable, "-c", sys.argv[1], "0"], check=True, timeout={HANG_S})
    print(second.communicate(timeout={HANG_S})[0], end="")
finally:
    second.kill()
"""
PROBE = "ip link add wl0 type veth peer name wl1 && ip link set wl0 up"


def test_ranks_meet_by_the_interface_that_leads_to_the_first_one() -> None:
    if shutil.which("unshare") is None or shutil.which("ip") is None:
        pytest.skip("unshare, of util-linux, or ip, of iproute2, not found")
    probed = subprocess.run(["unshare", "--net", "sh", "-c", PROBE], capture_output=True, text=True, check=False)
    if probed.returncode:
        pytest.skip(f"this system makes no links: {probed.stderr.strip()}")
    command = ["unshare", "--net", sys.executable, "-c", FIRST, RANK]
    environment = {
        name: value for name, value in os.environ.items() if name != "GLOO_SOCKET_IFNAME"
    }  # other tests set it
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=HANG_S, check=False)
    assert done.stdout == "3.0\n3.0\n", done.stderr


def test_the_interface_of_a_route_is_that_of_our_own_address() -> None:
    loopback = interface_towards("127.0.0.1")
    assert loopback
    assert address_of_interface(loopback) == "127.0.0.1"
    assert interface_towards("::1") == interface_towards("localhost") == loopback
    assert interface_towards("no such host") == interface_towards("") == ""
