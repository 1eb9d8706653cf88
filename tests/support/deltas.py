"""Deltas of one tensor, as they arrive at a rollout rank."""

from __future__ import annotations

import torch

from weightlane.sync import IncomingDelta, Manifest, TensorSpec
from weightlane.sync.codecs.delta.encoding import delta_manifest
from weightlane.sync.codecs.delta.format import Encoded, encode
from weightlane.sync.version.box import Box
from weightlane.sync.version.manifest_message import DeltaSegment


def delta_between(name: str, old: torch.Tensor, new: torch.Tensor) -> IncomingDelta:
    """The delta from one version of the tensor `name` to another."""
    encoded = encode(old, new)
    assert isinstance(encoded, Encoded)
    box = Box((0,) * old.ndim, tuple(old.shape))
    layout = Manifest(1, (TensorSpec(name, box.shape, old.dtype),), 1 << 20)
    manifest = delta_manifest(layout, 2, (1, "t/1"), "t/2", [[DeltaSegment(0, box, encoded.nbytes)]])
    return IncomingDelta(manifest, iter([encoded.to_bytes()]).__next__)
