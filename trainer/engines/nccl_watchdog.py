"""Make failed NCCL collectives of the trainer ranks errors of the running call, where torch's watchdog would end the process."""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.distributed as dist

_SETTINGS = {
    # At a timeout or an error the watchdog aborts the group's communicators, so that kernels which wait for a peer end, and
    # lets the process live (torch's ErrorHandlingMode CleanUpOnly).
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "2",
    # Otherwise a monitor ends the process eight minutes after any rank's timeout, also on the ranks that noticed nothing.
    "TORCH_NCCL_ENABLE_MONITORING": "0",
    # The watchdog waits four times this before it aborts, for the flight recorder: by default a minute.
    "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "500",
}
"""Read by ``ProcessGroupNCCL`` when it is made, which engines do at several places (meshes, Megatron's groups)."""
_CUDA = torch.device("cuda")


def keep_process_alive() -> None:
    """Let NCCL groups that are made from now on leave the process alive. What the user has set stays.

    A group that the program made before keeps torch's behaviour: its watchdog ends the process.
    """
    for name, value in _SETTINGS.items():
        os.environ.setdefault(name, value)


def found_by_watchdog() -> str:
    """Return how a collective of this process's groups has failed, by torch's name (``TIMEOUT``, ``COMM_ERROR``), or "".

    Once the communicators of a group were aborted, its collectives leave their outputs half written, and raise nothing: whatever
    was computed since is not to be used.
    """
    for group in _groups():
        if _CUDA in group._device_types:
            name: str = group._get_backend(_CUDA).get_error().name
            if name != "SUCCESS":
                return name
    return ""


def _groups() -> list[Any]:
    return list(dist.distributed_c10d._world.pg_map) if dist.is_nccl_available() else []
