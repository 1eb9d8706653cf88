"""A training process that also runs one half of an engine, which `test_nccl.py` runs in a forked child.

Rank 0 sends and rank 1 receives, between two collectives of torch's default process group.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from weightlane.ckpt_engines import Bucket, CheckpointEngineRegistry, Deadline, SenderLink, Topology
from weightlane.ckpt_engines.links.receiver_link import make_receiver_link
from weightlane.ckpt_engines.links.sender_link import make_sender_link
from weightlane.ckpt_engines.runtime.devices import runtime_of
from weightlane.ckpt_engines.runtime.json_socket import JsonSocket

NBYTES = 1_000_003


def all_reduced(rank: int, device: torch.device) -> float:
    """1 of rank 0 and 2 of rank 1: 3."""
    value = torch.tensor([float(rank + 1)], device=device)
    dist.all_reduce(value)
    return float(value)


def exchange(directory: Path, name: str, other: str, address: Any, deadline: Deadline) -> Any:
    """Leave this side's address in `directory` and take the other's."""
    (directory / f"{name}.new").write_text(json.dumps(dict(address)))
    (directory / f"{name}.new").rename(directory / f"{name}.json")
    while not (directory / f"{other}.json").exists():
        deadline.check(f"{other}'s address", part=name)
        time.sleep(0.01)
    return json.loads((directory / f"{other}.json").read_text())


def train(answers: JsonSocket, rank: int, engine: str, device_type: str, port: int, directory: str) -> None:
    """Run in a child: train, transfer a bucket, train on, and report what was seen."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    device = torch.device("cpu")
    if device_type != "cpu":
        device = torch.device(device_type, rank)
        torch.get_device_module(device_type).set_device(device)
    deadline = Deadline.after(240)
    dist.init_process_group(
        engine, init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2, timeout=deadline.timedelta()
    )
    seen: dict[str, Any] = {"before": all_reduced(rank, device)}
    environment = dict(os.environ)
    made = CheckpointEngineRegistry().create(engine)
    link = make_sender_link(made, "s", device) if rank == 0 else make_receiver_link(made, "r", device)
    mine, other = ("s", "r") if rank == 0 else ("r", "s")
    theirs = exchange(Path(directory), mine, other, link.address(), deadline)
    sender, receiver = (link.address(), theirs) if rank == 0 else (theirs, link.address())
    link.connect(Topology("beside", {"s": sender}, {"r": receiver}), deadline)
    payload = torch.arange(NBYTES, dtype=torch.int64).to(torch.uint8).to(device)
    received = torch.zeros_like(payload)
    written = runtime_of(device).recorded()
    if isinstance(link, SenderLink):
        link.post(Bucket(1, 0, payload, written), ["r"], deadline)
    else:
        link.post(Bucket(1, 0, received, written), "s", deadline)
    link.flush(deadline)
    seen["arrived"] = rank == 0 or torch.equal(received, payload)
    link.close()
    seen["after"] = all_reduced(rank, device)
    seen["environment"] = "unchanged" if dict(os.environ) == environment else "changed"
    dist.destroy_process_group()
    answers.send(seen)
