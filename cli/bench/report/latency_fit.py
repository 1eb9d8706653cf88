"""`LatencyFit`: the fixed cost and the bandwidth of an engine's versions, for ``weightlane bench --fit``."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from pydantic import BaseModel, ConfigDict


class LatencyFit(BaseModel):
    """The latency of a row as a fixed cost plus bytes over a bandwidth, fitted to the model and to parts of it."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    fixed_s: float
    """The latency of a version of no bytes."""
    bytes_per_s: float | None
    """Bytes of the payload per second; null if more bytes took no longer."""
    payload_bytes: tuple[int, ...]
    """The sizes that were measured."""
    latency_s: tuple[float, ...]
    """The median latency of each."""

    @classmethod
    def through(cls, payload_bytes: Sequence[int], latency_s: Sequence[float]) -> LatencyFit:
        """Fit the line with the least relative errors. Sizes that are all alike give no bandwidth."""
        if len(set(payload_bytes)) > 1:
            slope, fixed = np.polyfit(payload_bytes, latency_s, 1, w=1 / np.asarray(latency_s))
        else:
            slope, fixed = 0.0, np.median(latency_s)
        bandwidth = 1 / float(slope) if slope > 0 else None
        return cls(
            fixed_s=float(fixed),
            bytes_per_s=bandwidth,
            payload_bytes=tuple(payload_bytes),
            latency_s=tuple(latency_s),
        )
