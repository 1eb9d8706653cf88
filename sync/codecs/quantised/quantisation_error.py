"""The error of quantised values against the original values."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class QuantisationReport:
    """The error of one tensor or of several, in float32. Reports of shards add up with ``+``."""

    elements: int = 0
    max_abs: float = 0.0
    """Largest absolute error."""
    squared_error: float = 0.0
    """Sum of the squared errors."""
    squared: float = 0.0
    """Sum of the squared original values."""

    @property
    def relative_rms(self) -> float:
        """Root mean square of the error over that of the values; 0 if all values are 0."""
        return math.sqrt(self.squared_error / self.squared) if self.squared else 0.0

    def to_plain(self) -> tuple[int, float, float, float]:
        """The fields in order, as JSON."""
        return self.elements, self.max_abs, self.squared_error, self.squared

    def __add__(self, other: QuantisationReport) -> QuantisationReport:
        return QuantisationReport(
            self.elements + other.elements,
            max(self.max_abs, other.max_abs),
            self.squared_error + other.squared_error,
            self.squared + other.squared,
        )

    @classmethod
    def of(cls, before: torch.Tensor, after: torch.Tensor) -> QuantisationReport:
        """Compare two float32 tensors of one shape."""
        if not before.numel():
            return cls()
        error = after - before
        return cls(
            before.numel(),
            float(error.abs().max()),
            float(error.double().square().sum()),
            float(before.double().square().sum()),
        )
