"""Typed errors for exceptions that vLLM raises while it builds, loads or computes a model: they name the layer and the cause.

A kernel refuses a weight by its dtype or shape and does not know the layer. The frames of the exception's traceback do.
"""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from types import FrameType

import torch

from weightlane.ckpt_engines import ConfigError

from .refused_models import first_line

_PACKED = ("weight input features", "weight out features", "expect weight to be bfloat16")
"""Parts of the errors by which vLLM's CPU kernels refuse to pack a weight for AMX."""
_AMX_HINT = (
    "vLLM's kernels for AMX take weights in bfloat16 whose dimensions are multiples of 32. Set the dtype to bfloat16. For latent"
    ' attention leave attention_backend out of rollout.extra_engine_args, or set it to "CPU_MLA".'
)


def model_error(cause: BaseException, action: str, *, part: str) -> ConfigError:
    """A `ConfigError` that says that vLLM cannot do `action`, in which layer, and why."""
    text = described_failure(cause)
    return ConfigError(f"vLLM cannot {action}: {text}", part=part, hint=hint_for(text))


def described_failure(cause: BaseException) -> str:
    """One sentence: the layer whose code raised `cause`, if it is known, and the error."""
    layer = failed_layer(cause)
    line = first_line(cause)
    if not isinstance(cause, ValueError | AssertionError) and not line.startswith(type(cause).__name__):
        line = f"{type(cause).__name__}: {line}"
    return f"{layer}: {line}" if layer else line


def hint_for(text: str) -> str:
    """The advice for a failure of vLLM's model code; empty if its cause is not a known one."""
    return _AMX_HINT if any(part in text for part in _PACKED) else ""


def failed_layer(cause: BaseException) -> str:
    """The full name of the layer whose code raised `cause`; empty if that was no layer's code.

    It is the innermost layer in the frames of the traceback. Its name is its place in the outermost module that contains it. A
    layer that is still being made has no place yet, but vLLM gives its constructor the name.
    """
    frames = list(_frames(cause))
    modules = [value for frame in frames for value in frame.f_locals.values() if isinstance(value, torch.nn.Module)]
    for layer in reversed(modules):
        for root in modules:
            if name := next((name for name, module in root.named_modules() if module is layer), ""):
                return name
    prefixes = (frame.f_locals.get("prefix") for frame in reversed(frames))
    return next((prefix for prefix in prefixes if prefix and isinstance(prefix, str)), "")


def _frames(cause: BaseException) -> Iterator[FrameType]:
    """The frames that `cause` passed, outermost first, then those of the exceptions that it was raised from."""
    seen: list[BaseException] = []
    error: BaseException | None = cause
    while error is not None and error not in seen:
        seen.append(error)
        yield from (frame for frame, _ in traceback.walk_tb(error.__traceback__))
        error = error.__cause__ or error.__context__
