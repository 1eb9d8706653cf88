"""A coordinator in a network of its own, whose link goes down and whose process is stopped: nobody hears of its end.

Run in a fresh network namespace. Prints, one a line, what each of those who wait for it is told.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "support"))
from waiting import NEVER_S, wait_until

from weightlane.ckpt_engines import Deadline, WeightlaneError
from weightlane.sync import Expectation, Rendezvous, RendezvousAddress, Subscriber

SILENCE_S = 2.0
HERE, THERE = "10.77.0.1", "10.77.0.2"
HOST = f"""
import sys
from weightlane.sync import Rendezvous
print("new network", flush=True)
sys.stdin.readline()
host = Rendezvous.host({THERE!r}, silence_s={SILENCE_S})
print(host.address.port, host.address.secret, flush=True)
sys.stdin.readline()
"""


def run(command: str) -> None:
    subprocess.run(command.split(), check=True)


def main() -> None:
    host = subprocess.Popen(
        ["unshare", "--net", sys.executable, "-c", HOST], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        lose(host)
    finally:
        host.kill()
        host.wait()
    os._exit(0)


def lose(host: subprocess.Popen[str]) -> None:
    """Wait for the coordinator in `host` in several ways, and have its link and its process stop meanwhile."""
    assert host.stdin is not None
    assert host.stdout is not None
    host.stdout.readline()
    there = f"nsenter --target {host.pid} --net"
    for command in (
        "ip link set lo up",
        "ip link add wl0 type veth peer name wl1",
        f"ip link set wl1 netns {host.pid}",
        f"ip addr add {HERE}/24 dev wl0",
        "ip link set wl0 up",
        f"{there} ip addr add {THERE}/24 dev wl1",
        f"{there} ip link set wl1 up",
    ):
        run(command)
    print(file=host.stdin, flush=True)
    port, secret = host.stdout.readline().split()
    address = RendezvousAddress(THERE, int(port), secret)
    joined = Rendezvous.join(address)
    subscriber = Subscriber("r/0", address, "shm", {}, Expectation({}))
    never = Deadline.after(NEVER_S)
    inbox, busy = joined.inbox("r"), Rendezvous.join(address)
    waits = [
        lambda: subscriber.wait(1, NEVER_S),
        inbox.get,
        lambda: joined.mailbox("s").get("key", never),
        lambda: busy.mailbox("s").get("key", never),
    ]

    def tell(wait: object) -> None:
        try:
            wait()  # type: ignore[operator]
        except WeightlaneError as error:
            os.write(1, f"{type(error).__name__}: {error}\n".encode())  # at once: several speak at the same time

    joined.mailbox("s").put("answered", 1)
    joined.mailbox("s").get("answered", never)
    waiting = [threading.Thread(target=tell, args=(wait,), daemon=True) for wait in waits]
    for thread in waiting:
        thread.start()
    busy.mailbox("s").get("answered", never)
    os.kill(host.pid, signal.SIGSTOP)
    run(f"{there} ip link set wl1 down")
    busy.mailbox("s").put("key", "x" * 100)  # is never acknowledged
    wait_until(lambda: not any(thread.is_alive() for thread in waiting), "end of all who wait")


if __name__ == "__main__":
    main()
