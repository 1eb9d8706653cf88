"""The JSON form of a manifest: field types and limits that a receiver checks first, because the message is not trusted."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, Strict, ValidationError

from weightlane.ckpt_engines import ProtocolError

from .box import Box
from .tensor_spec import TensorSpec, dtype_of

LIMIT = 2**63
"""Versions, sizes and offsets stay below this, because torch counts in signed 64-bit numbers."""

_Count = Annotated[int, Field(ge=0, lt=LIMIT), Strict()]
Counts = Annotated[list[_Count], Field(max_length=64)]
_Text = Annotated[str, Field(max_length=200)]
# JSON has lists only, which strict mode would not take for tuples.
Segment = Annotated[tuple[_Count, Counts, Counts, _Count], Strict(strict=False)]
_Tensor = Annotated[tuple[str, Counts, str], Strict(strict=False)]


class ManifestMessage(BaseModel):
    """The message form of a manifest; for the fields see `Manifest`."""

    model_config = ConfigDict(extra="forbid", strict=True)

    version: _Count
    codec: Literal["dense", "delta"]
    base_version: _Count | None
    identity: _Text = ""
    base_identity: _Text = ""
    segments: list[Segment] = []
    bucket_bytes: Annotated[_Count, Field(gt=0)]
    whole_tensors: bool = False
    checksummed: bool = True
    lasting: bool = False
    quantised: Literal["", "fp8"] = ""
    plan: _Text = ""
    tensors: list[_Tensor] = []

    @property
    def specs(self) -> tuple[TensorSpec, ...]:
        """The tensors. Raises `ProtocolError` for an unknown dtype."""
        return tuple(TensorSpec(name, tuple(shape), dtype_of(dtype)) for name, shape, dtype in self.tensors)

    @property
    def delta_segments(self) -> tuple[DeltaSegment, ...]:
        """The segments of a delta."""
        return tuple(map(DeltaSegment.from_checked, self.segments))

    @classmethod
    def parse(cls, plain: Any) -> ManifestMessage:
        """Check a message; raises `ProtocolError` with the first wrong field."""
        try:
            return cls.model_validate(plain)
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(map(str, first["loc"]))
            raise ProtocolError(f"not a valid manifest: {where}: {first['msg']}.", part="manifest") from None


@dataclass(frozen=True, slots=True)
class DeltaSegment:
    """Describes the delta of a slice of one tensor, without its bytes."""

    tensor: int
    """Index of the tensor in the manifest's `specs`."""
    box: Box
    """The slice. Its elements are counted in row-major order."""
    nbytes: int
    """Length of the delta on the wire; see `weightlane.sync.codecs.delta.format`."""

    @property
    def numel(self) -> int:
        """Number of elements."""
        return self.box.numel

    def to_plain(self) -> list[Any]:
        """The segment as JSON: ``[tensor, starts, shape, nbytes]``."""
        return [self.tensor, *self.box.to_plain(), self.nbytes]

    @classmethod
    def from_checked(cls, plain: tuple[int, list[int], list[int], int]) -> DeltaSegment:
        """Undo `to_plain` for a segment whose types were checked."""
        tensor, starts, shape, nbytes = plain
        return cls(tensor, Box(tuple(starts), tuple(shape)), nbytes)
