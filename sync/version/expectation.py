"""The tensors that a receiver expects, and the check of a manifest against them before the first byte is sent."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from weightlane.ckpt_engines import ManifestError

from .manifest import Manifest
from .tensor_spec import TensorSpec, dtype_name, is_computed, renamed

_SHOWN = 6
"""Limit for the names and for the problems that one error lists, so that it fits on a screen."""
_FUSED = ("qkv_proj", "gate_up_proj", "query_key_value", "linear_qkv", "linear_fc1")
_MODEL_HINT = "Trainer and rollout must load the same model."
_DTYPE_HINT = "sync.wire_dtype must be the rollout's dtype."


@dataclass(frozen=True, slots=True)
class ExpectedTensor:
    """Shape and acceptable wire dtypes of one checkpoint tensor."""

    shape: tuple[int, ...]
    dtypes: frozenset[torch.dtype]


@dataclass(frozen=True, slots=True)
class Expectation:
    """The checkpoint tensors that a receiver's model loads."""

    tensors: Mapping[str, ExpectedTensor]
    """The tensors that a version must have."""
    tied: Mapping[str, str] = field(default_factory=dict)
    """The expected tensor that each alias shares memory with. An alias must not be sent: its own values would be lost."""
    dtype: torch.dtype | None = None
    """The dtype to which quantised tensors are restored; None if each tensor accepts only one dtype."""
    unread: frozenset[str] = frozenset()
    """Further tensors of the checkpoint, which no rank's model reads. A version may have them; they are not loaded."""
    place: Callable[[str], str | None] | None = None
    """Maps a tensor's name to its place in the model, or to None if that is unknown. Names with one place are one tensor."""

    def own_names(self, sent: Collection[str]) -> dict[str, str]:
        """The receiver's name of each tensor that is `sent` under another name. Unexpected tensors are left out."""
        sent = [name for name in sent if not is_computed(name)]
        if self.tensors.keys() >= set(sent):
            return {}
        expected = [*self.tensors, *self.unread]
        found = renamed(sent, expected)
        sent_to = self._by_place(set(sent).difference(expected, found, self.tied))
        missing_from = self._by_place(set(expected).difference(sent, found.values()))
        # If two sent tensors have one place, neither is matched.
        return found | {
            names[0]: missing_from[place][0]
            for place, names in sent_to.items()
            if len(names) == len(missing_from.get(place, ())) == 1
        }

    def _by_place(self, names: Iterable[str]) -> dict[str, list[str]]:
        """Group the `names` of tensors by their place in the model, if that is known."""
        found: dict[str, list[str]] = defaultdict(list)
        for name in names:
            if self.place is not None and (place := self.place(name)) is not None:
                found[place].append(name)
        return found


def check_coverage(
    manifest: Manifest, expectation: Expectation, *, part: str, specs: Sequence[TensorSpec] | None = None
) -> None:
    """Raise one `ManifestError` that lists all mismatches between a version and the receiver's tensors, if there are any.

    Mismatches are missing, unexpected, fused and padded tensors, and tensors of another shape or dtype. A version may have
    tensors that are unread or `is_computed`. With `specs`, these are the version's tensors as they are loaded.
    """
    sent = {spec.name: spec for spec in (manifest.tensors if specs is None else specs)}
    own = expectation.own_names(sent.keys())
    here = {*sent, *own.values()}
    missing = [name for name in expectation.tensors if name not in here and name not in expectation.tied]
    names = [f"missing {some(missing)}"] if missing else []
    names += [
        f"{alias} was sent as a tensor of its own, and is {name} here"
        for alias, name in expectation.tied.items()
        if alias in sent
    ]
    known = {*expectation.tensors, *expectation.unread, *expectation.tied, *own}
    if unexpected := [name for name in sent if name not in known and not is_computed(name)]:
        fused = [name for name in unexpected if any(word in name for word in _FUSED)]
        note = " (these look fused; send Hugging Face's unfused tensors)" if fused else ""
        names.append(f"unexpected {some(unexpected)}{note}")
    shapes, dtypes = [], []
    for name, spec in sent.items():
        named = own.get(name, name)
        expected = expectation.tensors.get(expectation.tied.get(named, named))
        if expected is not None:
            shapes += _other_shape(spec, expected)
            dtypes += _other_dtype(spec, expected)
    if problems := [*names, *shapes, *dtypes]:
        shown = "; ".join(problems[:_SHOWN]) + (
            f"; and {len(problems) - _SHOWN} more" if len(problems) > _SHOWN else ""
        )
        hints = [_MODEL_HINT] * bool(names or shapes) + [_DTYPE_HINT] * bool(dtypes)
        raise ManifestError(f"the trainer's weights do not fit this model: {shown}.", part=part, hint=" ".join(hints))


def _other_shape(spec: TensorSpec, expected: ExpectedTensor) -> list[str]:
    if spec.shape == expected.shape:
        return []
    padded = (
        len(spec.shape) == len(expected.shape) > 0
        and spec.shape[0] > expected.shape[0]
        and spec.shape[1:] == expected.shape[1:]
    )
    note = " (padded rows? remove them before sending)" if padded else ""
    return [f"{spec.name} has shape {list(spec.shape)}, expected {list(expected.shape)}{note}"]


def _other_dtype(spec: TensorSpec, expected: ExpectedTensor) -> list[str]:
    if spec.dtype in expected.dtypes:
        return []
    return [
        f"{spec.name} is {dtype_name(spec.dtype)}, expected {' or '.join(sorted(map(dtype_name, expected.dtypes)))}"
    ]


def some(names: Sequence[str]) -> str:
    """Text with the first `_SHOWN` names and the number of the others."""
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return f"{', '.join(names[:_SHOWN])}{more}"
