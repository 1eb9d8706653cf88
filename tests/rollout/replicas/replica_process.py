"""A replica as a `json_program`, so that a test can kill the process that owns it."""

from __future__ import annotations

import asyncio

from json_program import serve

from weightlane.rollout import LocalReplica, RolloutConfig


class Owner:
    """Starts one replica, and never closes it."""

    def start(self, model: str) -> None:
        config = RolloutConfig(dtype="float32", max_model_len=64, kv_cache_memory_bytes=16 << 20)
        self._worker = LocalReplica("rollout-0", config, model)
        self._runner = asyncio.Runner()
        self._runner.run(self._worker.start())


if __name__ == "__main__":
    serve(Owner())
