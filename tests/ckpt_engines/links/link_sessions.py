"""Buckets and halves of the sessions that the tests of links use."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch
from links import StillReceiver, StillSender
from sessions import Session

from weightlane.ckpt_engines import Bucket

NBYTES = 4096
Sessions = Callable[..., Session]


def bucket(version: int = 1, index: int = 0, nbytes: int = NBYTES, **more: Any) -> Bucket:
    return Bucket(version, index, torch.zeros(nbytes, dtype=torch.uint8), **more)


def sender_of(session: Session) -> StillSender:
    return cast("StillSender", session.sender.half)


def receiver_of(session: Session, name: str = "a") -> StillReceiver:
    return cast("StillReceiver", session.receivers[name].half)
