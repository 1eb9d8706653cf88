"""Transfers through faulty engines, and what arrives."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any

import pytest
import torch
from sessions import Session, receive, send
from waiting import HANG_S

from weightlane.ckpt_engines import (
    Bucket,
    Deadline,
)
from weightlane.ckpt_engines.engines.faulty.fault_config import FaultKind

SIZE = 4096
Received = Future[list[torch.Tensor]]


def carry(
    session: Session, buckets: list[torch.Tensor], deadline_s: float = HANG_S, receive_s: float | None = None
) -> tuple[Future[None], Received]:
    """Send `buckets` as version 1; a side closes as soon as it fails, as the framework would do."""
    deadline = Deadline.after(deadline_s)
    until = Deadline.after(deadline_s if receive_s is None else receive_s)

    def send_all() -> None:
        try:
            for index, data in enumerate(buckets):
                send(session.sender, Bucket(1, index, data), ["r"], deadline)
        except BaseException:
            session.sender.close()
            raise

    def receive_all() -> list[torch.Tensor]:
        received = []
        try:
            for index, data in enumerate(buckets):
                received.append(torch.zeros_like(data))
                receive(session.receiver, Bucket(1, index, received[-1]), "s", until)
        except BaseException:
            session.receiver.close()
            raise
        return received

    return session.threads.submit(send_all), session.threads.submit(receive_all)


def always(kind: FaultKind, **options: Any) -> dict[str, Any]:
    """Options under which the first bucket of a version meets `kind`."""
    return {"kinds": [kind], "rate": 1, **options}


def half_of(session: Session, side: str) -> Any:
    return session.sender if side == "sender" else session.receiver


def note_waits(half: Any, monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Instead of waiting, a half's faults note for how long they would."""
    waits: list[float] = []
    monkeypatch.setattr(half._faults._closed, "wait", waits.append)
    return waits


def payloads(count: int = 3) -> list[torch.Tensor]:
    return [torch.randint(0, 256, (SIZE,), dtype=torch.uint8) for _ in range(count)]


def changed_bits(one: torch.Tensor, other: torch.Tensor) -> int:
    return sum(int(byte).bit_count() for byte in (one ^ other).tolist())
