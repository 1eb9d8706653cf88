"""Joining the trainer ranks, also on two machines, and failures of their collectives.

Two machines are network namespaces whose host name leads nowhere, as in many clusters. A stand-in says what torch's watchdog of a
group of NCCL would have found.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from waiting import HANG_S

from weightlane.ckpt_engines import ConfigError, DeadlineExceededError, PeerLostError
from weightlane.ckpt_engines.engines.torch_distributed.interfaces import address_of_interface, interface_towards
from weightlane.trainer.engines import rank_collectives
from weightlane.trainer.engines.rank_collectives import group_backend, typed_collective_errors

PROGRAM = f"""
import ctypes, os, subprocess
import torch, torch.distributed as dist
from weightlane.trainer.engines.rank_collectives import join_ranks

os.environ.pop("GLOO_SOCKET_IFNAME", None)  # other tests set it
dist.distributed_c10d.ProcessGroupGloo = dist.ProcessGroupGloo  # which chooses its device itself: see `fork_server`
NEW_NETWORK = 0x40000000

def enter_a_new_network():
    assert ctypes.CDLL(None).unshare(NEW_NETWORK) == 0

def meet(rank):
    join_ranks(rank, 2, ("10.77.0.1", 29500), torch.device("cpu"), {HANG_S})
    total = torch.tensor([1.0 + rank])
    dist.all_reduce(total)
    os.write(1, f"{{total.item()}}\\n".encode())  # at once, whatever the other one writes

enter_a_new_network()
(entered, told), (go_on, connected) = os.pipe(), os.pipe()
second = os.fork()
if second == 0:
    enter_a_new_network()
    os.write(told, b"!")
    os.read(go_on, 1)
    meet(1)
    os._exit(0)
os.read(entered, 1)
there = f"nsenter --target {{second}} --net "
for command in (
    "ip link set lo up",
    there + "ip link set lo up",
    "ip link add wl0 type veth peer name wl1",
    f"ip link set wl1 netns {{second}}",
    "ip addr add 10.77.0.1/24 dev wl0",
    "ip link set wl0 up",
    there + "ip addr add 10.77.0.2/24 dev wl1",
    there + "ip link set wl1 up",
):
    subprocess.run(command.split(), check=True)
os.write(connected, b"!")
meet(0)
os.waitpid(second, 0)
"""
PROBE = "ip link add wl0 type veth peer name wl1 && ip link set wl0 up"


def test_ranks_meet_by_the_interface_that_leads_to_the_first_one(children: Any) -> None:
    if shutil.which("unshare") is None or shutil.which("ip") is None:
        pytest.skip("unshare, of util-linux, or ip, of iproute2, not found")
    probed = subprocess.run(["unshare", "--net", "sh", "-c", PROBE], capture_output=True, text=True, check=False)
    if probed.returncode:
        pytest.skip(f"this system makes no links: {probed.stderr.strip()}")
    status, output, errors = children.run(["-c", PROGRAM], forked=True)
    assert (status, output) == (0, "3.0\n3.0\n"), errors


def test_the_interface_of_a_route_is_that_of_our_own_address() -> None:
    loopback = interface_towards("127.0.0.1")
    assert loopback
    assert address_of_interface(loopback) == "127.0.0.1"
    assert interface_towards("::1") == interface_towards("localhost") == loopback
    assert interface_towards("no such host") == interface_towards("") == ""


def test_what_the_watchdog_of_nccl_finds_is_an_error_of_the_call_and_never_the_end_of_the_process(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in rank_collectives._LIVING_ON:
        monkeypatch.setenv(name, "the user's")
    monkeypatch.delenv("TORCH_NCCL_ASYNC_ERROR_HANDLING")
    assert group_backend(torch.device("cuda")) == "cpu:gloo,cuda:nccl"
    assert os.environ["TORCH_NCCL_ASYNC_ERROR_HANDLING"] == "2", "1 and 3 end the process, 0 waits for ever"
    assert os.environ["TORCH_NCCL_ENABLE_MONITORING"] == "the user's"

    found = ["SUCCESS", "SUCCESS"]

    def group(rank: int) -> Any:
        backend = SimpleNamespace(get_error=lambda: SimpleNamespace(name=found[rank]))
        return SimpleNamespace(_device_types=[torch.device("cuda")], _get_backend=lambda device: backend)

    cuda, on_cpus = [torch.device("cuda")], SimpleNamespace(_device_types=[torch.device("cpu")])
    gloo = SimpleNamespace(_device_types=cuda, _get_backend=lambda _: dist.ProcessGroupGloo)
    monkeypatch.setattr(rank_collectives, "_nccl_groups", lambda: [on_cpus, gloo, group(0), group(1)])
    for name, error in (("TIMEOUT", DeadlineExceededError), ("COMM_ERROR", PeerLostError)):
        found[1] = "SUCCESS"
        with typed_collective_errors("a pass", "trainer rank 0", 7):
            pass
        with pytest.raises(error, match="a pass"), typed_collective_errors("a pass", "trainer rank 0", 7):
            found[1] = name  # and the aborted collective returns as if it were done
        blamed = ConfigError("the loss is not a number.", part="x")
        with pytest.raises(error), typed_collective_errors("a pass", "trainer rank 0", 7):
            raise blamed
