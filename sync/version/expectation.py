"""The tensors that a receiver expects, and the check of a manifest against them before the first byte is sent."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from weightlane.ckpt_engines import ManifestError

from .manifest import Manifest
from .tensor_spec import TensorSpec, dtype_name

_SHOWN = 6
"""Names and problems that one error lists, so that it fits on a screen."""
_FUSED = ("qkv_proj", "gate_up_proj", "query_key_value", "linear_qkv", "linear_fc1")


@dataclass(frozen=True, slots=True)
class ExpectedTensor:
    """Shape and acceptable wire dtypes of one checkpoint tensor."""

    shape: tuple[int, ...]
    dtypes: frozenset[torch.dtype]


@dataclass(frozen=True, slots=True)
class Expectation:
    """The checkpoint tensors a receiver's model is made of."""

    tensors: Mapping[str, ExpectedTensor]
    tied: Mapping[str, str] = field(default_factory=dict)
    """The expected tensor that each alias shares memory with. An alias is not sent: its own values would be lost."""
    dtype: torch.dtype | None = None
    """The dtype to which quantised tensors are restored; None where each tensor accepts only one."""


def check_coverage(
    manifest: Manifest, expectation: Expectation, *, part: str, specs: Sequence[TensorSpec] | None = None
) -> None:
    """Raise one `ManifestError` that lists every kind of disagreement, or return.

    Reported: missing, unexpected, fused, padded, mis-shaped and mis-typed tensors.

    Args:
        manifest: The version.
        expectation: The receiver's tensors.
        part: The receiver, for the error.
        specs: The version's tensors as they are loaded, if they differ from the manifest's.
    """
    sent = {spec.name: spec for spec in (manifest.tensors if specs is None else specs)}
    problems: list[str] = []

    missing = [name for name in expectation.tensors if name not in sent and name not in expectation.tied]
    unexpected = [name for name in sent if name not in expectation.tensors and name not in expectation.tied]
    if missing:
        problems.append(f"missing {_some(missing)}")
    problems += [
        f"{alias} was sent as a tensor of its own, and is {name} here"
        for alias, name in expectation.tied.items()
        if alias in sent
    ]
    if unexpected:
        fused = [name for name in unexpected if any(word in name for word in _FUSED)]
        note = " (these look fused; send Hugging Face's unfused tensors)" if fused else ""
        problems.append(f"unexpected {_some(unexpected)}{note}")
    for name, spec in sent.items():
        expected = expectation.tensors.get(expectation.tied.get(name, name))
        if expected is not None:
            problems.extend(_mismatch(spec, expected))
    if problems:
        shown = "; ".join(problems[:_SHOWN]) + (
            f"; and {len(problems) - _SHOWN} more" if len(problems) > _SHOWN else ""
        )
        raise ManifestError(
            f"version {manifest.version} does not fit this model: {shown}.",
            part=part,
            hint="Trainer and rollout must load the same model directory, and sync.wire_dtype must be the rollout's dtype.",
        )


def _mismatch(spec: TensorSpec, expected: ExpectedTensor) -> list[str]:
    problems = []
    if spec.shape != expected.shape:
        padded = (
            len(spec.shape) == len(expected.shape) > 0
            and spec.shape[0] > expected.shape[0]
            and spec.shape[1:] == expected.shape[1:]
        )
        note = " (padded rows? remove them before sending)" if padded else ""
        problems.append(f"{spec.name} has shape {list(spec.shape)}, expected {list(expected.shape)}{note}")
    if spec.dtype not in expected.dtypes:
        wanted = " or ".join(sorted(map(dtype_name, expected.dtypes)))
        problems.append(f"{spec.name} is {dtype_name(spec.dtype)}, expected {wanted}")
    return problems


def _some(names: list[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return f"{', '.join(names[:_SHOWN])}{more}"
