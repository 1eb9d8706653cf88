"""Evidence for each built-in engine: which tests were run, where and when, and which were not.

`reference` prints it. Update it together with the run.
"""

from __future__ import annotations

from dataclasses import dataclass

_CPU = "two-core x86-64 virtual machine, no GPU, torch 2.13.0+cpu"
_GPU = "one H200 GPU, torch 2.11.0+cu130, NCCL 2.28.9"
_PRETENDED = (
    "Streams, events, memory and the order of operations, on pretended devices that find a missing wait, a wrong device and"
    " memory that is reused too early."
)


@dataclass(frozen=True, slots=True)
class Evidence:
    """One row of an engine's table."""

    what: str
    result: str
    """``"run"``, or ``"not run"``."""
    date: str
    """ISO 8601."""
    device: str


EVIDENCE: dict[str, tuple[Evidence, ...]] = {
    "gloo": (
        Evidence("Conformance suite, several senders, beside a default process group.", "run", "2026-11-25", _CPU),
        Evidence("Several machines, several network cards.", "not run", "2026-11-25", "no second machine"),
    ),
    "nccl": (
        Evidence(
            "Control connections, options, aborts that hang: without NCCL, in CPU memory.", "run", "2026-11-25", _CPU
        ),
        Evidence(_PRETENDED, "run", "2026-11-25", _CPU),
        Evidence(
            "Three quarters of the conformance suite, between processes that share a GPU over NCCL's sockets"
            " (`python -m benchmarks.gpu.one_gpu nccl`): deadlines, deaths, aborts, delivery.",
            "run",
            "2026-11-28",
            _GPU,
        ),
        Evidence(
            "A GPU for each rank, over NVLink or InfiniBand (`make gpu PARTS=multi`).",
            "not run",
            "2026-11-28",
            "one GPU",
        ),
    ),
    "hccl": (
        Evidence("As for `nccl`.", "run", "2026-11-25", _CPU),
        Evidence(_PRETENDED, "run", "2026-11-25", _CPU),
        Evidence("HCCL itself, and torch_npu (`pytest -m npu`, two NPUs or more).", "not run", "2026-11-25", "no NPU"),
    ),
    "shm": (
        Evidence(
            "Conformance suite; kill -9 of either side in every phase; sender and receiver in user, mount, pid, network and"
            " IPC namespaces of their own.",
            "run",
            "2026-11-25",
            _CPU,
        ),
    ),
    "cuda_ipc": (
        Evidence("The protocol, which is that of `shm`, over CPU memory.", "run", "2026-11-25", _CPU),
        Evidence(
            "How arguments reach the driver's functions: once, by hand, against a stand-in library that prints them.",
            "run",
            "2026-11-21",
            _CPU,
        ),
        Evidence(_PRETENDED, "run", "2026-11-25", _CPU),
        Evidence(
            "Conformance suite, memory after a kill, and torch's stream sanitizer, between processes that share a GPU.",
            "run",
            "2026-11-28",
            _GPU,
        ),
        Evidence("Two GPUs over NVLink or PCIe.", "not run", "2026-11-28", "one GPU"),
    ),
    "filesystem": (
        Evidence("Conformance suite on a local directory.", "run", "2026-11-25", _CPU),
        Evidence("`s3://` against an S3 API served by moto on loopback.", "run", "2026-11-25", _CPU),
        Evidence("NFS; S3 of a cloud provider.", "not run", "2026-11-25", "none at hand"),
    ),
}
"""Rows by engine name."""
