"""A model's tensors as a Hugging Face checkpoint has them, and where each is among megatron-core's local parameters."""

from .names import CheckpointSlice, Coordinates, pieces_of
from .shapes import EXPERT_BIAS, HEAD, VALUE_HEAD, CheckpointShape, DeltaShape, LatentShape, checkpoint_shapes

__all__ = [
    "EXPERT_BIAS",
    "HEAD",
    "VALUE_HEAD",
    "CheckpointShape",
    "CheckpointSlice",
    "Coordinates",
    "DeltaShape",
    "LatentShape",
    "checkpoint_shapes",
    "pieces_of",
]
