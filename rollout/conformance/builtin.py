"""The suites that ``weightlane conformance`` runs for the built-in rollout engines."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from .suite import RolloutEngineConformance


class VllmConformance(RolloutEngineConformance):
    """The suite for `vllm`, without the memory of a whole device for caches."""

    engine: ClassVar[str] = "vllm"
    settings: ClassVar[Mapping[str, Any]] = {"kv_cache_memory_bytes": 64 << 20}
    slack_s: ClassVar[float] = 30.0
