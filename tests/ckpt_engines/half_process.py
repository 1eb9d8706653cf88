"""One half of a checkpoint engine in a process of its own, driven by JSON lines on standard input.

Each line is ``{"op": name, ...arguments}``. The answer is ``{"ok": result, "s": seconds}``, or ``{"error": ..., "s": ...}``
with the error in wire form. Payloads never go over the pipe: both sides make the same bytes from a seed.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from pathlib import Path
from typing import Any

import torch

from weightlane.ckpt_engines import (
    Bucket,
    CheckpointEngineRegistry,
    Deadline,
    Topology,
    WeightReceiver,
    WeightSender,
    as_weightlane_error,
)

_BLOCK = 1_000_003  # prime, so that a shifted or swapped page never looks right


def pattern(nbytes: int, seed: int) -> torch.Tensor:
    """The payload that `seed` stands for."""
    block = torch.randint(
        0, 256, (min(nbytes, _BLOCK),), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed)
    )
    return block.repeat(nbytes // _BLOCK + 1)[:nbytes].contiguous() if nbytes else block


class DirectoryMailbox:
    """A `Mailbox` of JSON files in a directory."""

    def __init__(self, directory: str) -> None:
        self._directory = Path(directory)

    def put(self, key: str, value: Any) -> None:
        unfinished = self._directory / f"{key.replace('/', '_')}.{os.getpid()}"
        unfinished.write_text(json.dumps(value))
        unfinished.rename(self._directory / f"{key.replace('/', '_')}.json")

    def get(self, key: str, deadline: Deadline) -> Any:
        path = self._directory / f"{key.replace('/', '_')}.json"
        while not path.exists():
            deadline.check(key, part="mailbox")
            time.sleep(0.005)
        return json.loads(path.read_text())


class HalfProcess:
    """The operations. At most one half lives at a time."""

    half: WeightSender | WeightReceiver
    buffer: torch.Tensor | None = None

    def make(self, side: str, engine: str, options: dict[str, Any], name: str) -> None:
        made = CheckpointEngineRegistry().create(engine, options)
        self.half = made.make_sender(name) if side == "sender" else made.make_receiver(name)
        self.buffer = None

    def address(self) -> dict[str, Any]:
        return dict(self.half.address())

    def connect(self, topology: dict[str, Any], mailbox: str, deadline_s: float) -> None:
        self.half.connect(Topology(**topology), DirectoryMailbox(mailbox), Deadline.after(deadline_s))

    def send(self, buckets: list[list[int]], receivers: list[str], deadline_s: float, allocated: bool) -> None:
        """Send [version, index, nbytes, seed] one after the other, overwriting the memory after each."""
        assert isinstance(self.half, WeightSender)
        largest = max(nbytes for _, _, nbytes, _ in buckets)
        if self.buffer is None or self.buffer.numel() < largest:
            self.buffer = self.half.allocate(largest) if allocated else torch.empty(largest, dtype=torch.uint8)
        for version, index, nbytes, seed in buckets:
            data = self.buffer[:nbytes]
            data.copy_(pattern(nbytes, seed))
            self.half.send(Bucket(version, index, data), receivers, Deadline.after(deadline_s))
            data.fill_(0xAA)

    def receive(self, buckets: list[list[int]], sender: str, deadline_s: float) -> list[bool]:
        """Receive [version, index, nbytes, seed] one after the other; for each, whether it is right."""
        assert isinstance(self.half, WeightReceiver)
        right = []
        for version, index, nbytes, seed in buckets:
            data = torch.full((nbytes,), 0x55, dtype=torch.uint8)
            self.half.receive(Bucket(version, index, data), sender, Deadline.after(deadline_s))
            right.append(torch.equal(data, pattern(nbytes, seed)))
        return right

    def close_after(self, seconds: float) -> None:
        threading.Timer(seconds, self.half.close).start()

    def close(self) -> None:
        self.buffer = None
        self.half.close()
        self.half.close()

    def resources(self) -> dict[str, int]:
        """What could leak. File descriptors and threads of this process, and its mappings of memory files."""
        maps = Path("/proc/self/maps").read_text()
        return {
            "descriptors": len(list(Path("/proc/self/fd").iterdir())),
            "threads": len(list(Path("/proc/self/task").iterdir())),
            "mappings": maps.count("memfd:weightlane"),
        }


def _answer(answer: dict[str, Any], started: float) -> None:
    sys.stdout.write(json.dumps({**answer, "s": time.monotonic() - started}) + "\n")
    sys.stdout.flush()


def main() -> None:
    half = HalfProcess()
    _answer({"ok": "ready"}, time.monotonic())
    for line in sys.stdin:
        request = json.loads(line)
        started = time.monotonic()
        answer: dict[str, Any]
        try:
            answer = {"ok": getattr(half, request.pop("op"))(**request)}
        except Exception as error:  # noqa: BLE001 - crosses to the test
            answer = {"error": as_weightlane_error(error, "half process").to_wire()}
        _answer(answer, started)


if __name__ == "__main__":
    main()
