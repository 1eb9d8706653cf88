"""Tells the process that starts a replica why vLLM's own processes could not start.

vLLM says only that one of its processes has failed, and leaves the reason in the log. A worker process that cannot load or
compute the model therefore writes the typed error to a file, which the starting process reads and removes.
"""

from __future__ import annotations

import functools
import json
import os
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from weightlane.ckpt_engines import WeightlaneError, WorkerDiedError, error_from_wire

from ..layout.loading.model_errors import described_failure, failed_layer, model_error
from ..vllm_surface import WorkerWrapperBase, uses_weightlane
from .watchdog import WATCH_ENV

_STEPS = {
    "load_model": "load the model",
    "determine_available_memory": "compute with the model",
    "compile_or_warm_up_model": "compute with the model",
}
"""Methods of vLLM's workers that run the model's code at the start, and the words for them."""
_DISTRIBUTED = os.path.join("torch", "distributed")  # noqa: PTH118 - compared with the paths of code
_MOST_BYTES = 1 << 20


def install() -> None:
    """Let vLLM's workers in this process report why they cannot start, if a replica of weightlane starts them."""
    plain = WorkerWrapperBase.init_device

    @functools.wraps(plain)
    def init_device(wrapper: Any) -> None:
        plain(wrapper)
        if WATCH_ENV in os.environ and uses_weightlane(wrapper.vllm_config):
            for method, action in _STEPS.items():
                if hasattr(wrapper.worker, method):
                    setattr(wrapper.worker, method, _reporting(getattr(wrapper.worker, method), action, wrapper))

    WorkerWrapperBase.init_device = init_device


def take_failure(vllm_config: Any) -> WeightlaneError | None:
    """The first error that a process of this engine has reported; None if none has. Removes the file."""
    path = _file(vllm_config)
    try:
        if path.lstat().st_uid != os.geteuid():
            return None
        with path.open("rb") as file:
            return error_from_wire(json.loads(file.read(_MOST_BYTES)))
    except (OSError, ValueError, RecursionError):
        return None
    finally:
        with suppress(OSError):
            path.unlink()


def _reporting(step: Callable[..., Any], action: str, wrapper: Any) -> Callable[..., Any]:
    """`step`, whose exceptions are reported before they are raised."""

    @functools.wraps(step)
    def telling(*args: Any, **kwargs: Any) -> Any:
        try:
            return step(*args, **kwargs)
        except Exception as cause:
            with suppress(OSError):
                _report(wrapper.vllm_config, _error_of(cause, action, f"rollout rank {wrapper.global_rank}"))
            raise

    return telling


def _error_of(cause: Exception, action: str, part: str) -> WeightlaneError:
    """A `ConfigError` if a layer cannot do its work; memory and lost peers are no matter of the configuration."""
    if isinstance(cause, WeightlaneError):
        return cause
    if failed_layer(cause) and not isinstance(cause, torch.OutOfMemoryError) and not _was_distributed(cause):
        return model_error(cause, action, part=part)
    return WorkerDiedError(f"the engine ended while starting: {described_failure(cause)}", part=part)


def _was_distributed(cause: Exception) -> bool:
    """Whether a call to another rank has failed."""
    frame = cause.__traceback__
    while frame is not None:
        if _DISTRIBUTED in frame.tb_frame.f_code.co_filename:
            return True
        frame = frame.tb_next
    return False


def _report(vllm_config: Any, error: WeightlaneError) -> None:
    """Write the file, unless another process has: the first error is the cause of later ones."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
    with os.fdopen(os.open(_file(vllm_config), flags, 0o600), "w") as file:
        json.dump(error.to_wire(), file)


def _file(vllm_config: Any) -> Path:
    """Path of the file for an error. Only processes of one engine know it: they inherit the variable, and get vLLM's config."""
    return Path(tempfile.gettempdir()) / f"weightlane-start-{os.environ[WATCH_ENV]}-{vllm_config.instance_id}.json"
