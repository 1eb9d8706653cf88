"""Calls of the control hub in threads, the values that it keeps, and hubs in processes of their own."""

from __future__ import annotations

import ctypes
import os
import resource
import subprocess
import threading
from collections.abc import Callable
from typing import Any

from waiting import NEVER_S, wait_until

from weightlane.ckpt_engines import Deadline, WeightlaneError
from weightlane.sync import Expectation, Rendezvous, RendezvousAddress, Subscriber

CLONE_NEWNET = 0x40000000
"""Flag of Linux' ``unshare`` that gives the calling thread a network of its own."""


def raised_by(call: Callable[[], Any]) -> tuple[threading.Thread, list[WeightlaneError]]:
    """Run `call` on a thread of its own, and return the thread and the list that gets the error."""
    errors: list[WeightlaneError] = []

    def run() -> None:
        try:
            call()
        except WeightlaneError as error:
            errors.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread, errors


def value_counts(rendezvous: Rendezvous) -> dict[str, int]:
    """How many values the hub keeps in each scope."""
    scopes = list(rendezvous._hub.mailboxes._scopes.items())
    return {name: len(scope.values) for name, scope in scopes if scope.values}


class HubProcess:
    """A hub in a process of its own, which may have few file descriptors or a network of its own."""

    def __init__(self, descriptors: int = 0, own_network: bool = False) -> None:
        if descriptors:
            resource.setrlimit(resource.RLIMIT_NOFILE, (descriptors, descriptors))
        if own_network:
            enter_own_network()

    def host(self, address: str = "127.0.0.1", silence_s: float = 20.0) -> dict[str, Any]:
        self._hosted = Rendezvous.host(address, silence_s=silence_s)
        return self._hosted.address.to_plain()


def enter_own_network() -> None:
    if ctypes.CDLL(None, use_errno=True).unshare(CLONE_NEWNET):
        raise OSError(ctypes.get_errno(), "unshare")


def run(command: str) -> None:
    subprocess.run(command.split(), check=True)


class RemoteMembers:
    """Members of a run that is hosted in another network: the two are linked by a virtual cable."""

    HERE, THERE = "10.77.0.1", "10.77.0.2"

    def __init__(self, host: int) -> None:
        """Link this process to the process `host`, which is in a network of its own."""
        enter_own_network()
        self._there = f"nsenter --target {host} --net"
        for command in (
            "ip link set lo up",
            "ip link add wl0 type veth peer name wl1",
            f"ip link set wl1 netns {host}",
            f"ip addr add {self.HERE}/24 dev wl0",
            "ip link set wl0 up",
            f"{self._there} ip addr add {self.THERE}/24 dev wl1",
            f"{self._there} ip link set wl1 up",
        ):
            run(command)

    def join(self, plain: dict[str, Any]) -> None:
        """Wait for the coordinator in four ways: for a version, for a message, and for values, idle and after sending."""
        address = RendezvousAddress.from_plain(plain)
        idle, self._busy = Rendezvous.join(address), Rendezvous.join(address)
        subscriber = Subscriber("r/0", address, "shm", {}, Expectation({}))
        never = Deadline.after(NEVER_S)
        idle.listen("r")
        self._busy.mailbox("s").put("answered", 1)
        self._busy.mailbox("s").get("answered", never)
        self._waits = [
            raised_by(wait)
            for wait in (
                lambda: subscriber.wait(1, NEVER_S),
                idle.receive,
                lambda: idle.mailbox("s").get("key", never),
                lambda: self._busy.mailbox("s").get("key", never),
            )
        ]

    def lose_host(self) -> list[str]:
        """Cut the cable, send something that is never acknowledged, and return the errors of all waits."""
        run(f"{self._there} ip link set wl1 down")
        self._busy.mailbox("s").put("key", "x" * 100)
        wait_until(lambda: not any(thread.is_alive() for thread, _ in self._waits), "end of all who wait")
        return [f"{type(error).__name__}: {error}" for _, errors in self._waits for error in errors]

    def close(self) -> None:
        """End at once: connections to a lost host are not closed in time."""
        os._exit(0)
