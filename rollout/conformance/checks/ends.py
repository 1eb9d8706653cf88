"""Checks of starts that are refused, of ``close``, and of resources that an engine leaves behind."""

from __future__ import annotations

import asyncio
import gc
import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from weightlane.ckpt_engines import ClosedError, ConfigError, WeightlaneError
from weightlane.ckpt_engines.conformance.checks.base import expect_no_more
from weightlane.ckpt_engines.conformance.processes import leftovers

from ...contract.engine import RolloutEngine
from ...contract.named_segments import segments_of_trees
from ...contract.registry import missing_capabilities
from ..models import PROMPT
from ..serving import Serving
from .base import RolloutConformanceBase, ServingMaker, Versions, failure_of

_UNDECLARED: Mapping[str, dict[str, Any]] = {
    "commits in place": {"commit": "in_place"},
    "several ranks": {"tensor_parallel": 2},
    "adapters": {"commit": "staged", "adapter": {"rank": 2, "alpha": 2.0}},
    "kept caches": {"kv_on_commit": "keep"},
    "further arguments": {"extra_engine_args": {"seed": 1}},
}
"""Settings that an engine takes only if its capabilities name them."""


def count() -> list[dict[str, int]]:
    """Count the resources of this process, without those of objects that nothing refers to any more."""
    gc.collect()
    return [leftovers.of_this_process()]


class EndChecks(RolloutConformanceBase):
    """Checks of starts that are refused, and of ends."""

    def test_undeclared_settings_are_refused_before_the_start(
        self, engine_type: type[RolloutEngine], make: ServingMaker, versions: Versions
    ) -> None:
        """A setting that `RolloutCapabilities` does not name is a `ConfigError` where the replica is made; others are not."""
        path = versions.path(self.models[0])
        usual = make(path).replica.config
        for what, settings in _UNDECLARED.items():
            config = type(usual).model_validate({**usual.model_dump(), **settings})
            refused = bool(missing_capabilities(config, engine_type.capabilities))
            try:
                make(path, **settings)
            except ConfigError:
                assert refused, f"expected {what} to be taken, as the engine's capabilities say"
            else:
                assert not refused, f"expected ConfigError for {what}, which the engine's capabilities do not name"

    def test_a_directory_without_a_causal_language_model_is_refused(
        self, make: ServingMaker, versions: Versions, tmp_path: Path
    ) -> None:
        """No directory, an empty one, one with another kind of model, one that lacks a tensor: ``start`` raises `ConfigError`."""
        from safetensors.torch import save_file  # noqa: PLC0415 - an extra
        from transformers import ViTConfig  # noqa: PLC0415 - an extra

        (tmp_path / "empty").mkdir()
        ViTConfig().save_pretrained(tmp_path / "vision")
        shutil.copytree(versions.path(self.models[0]), tmp_path / "incomplete")
        tensors = versions.tensors(self.models[0], 0)
        tensors.pop(next(name for name in tensors if name.endswith("norm.weight")))
        save_file(tensors, tmp_path / "incomplete/model.safetensors", metadata={"format": "pt"})
        for name in ("nowhere", "empty", "vision", "incomplete"):
            serving = make(tmp_path / name)
            what = f"the start from {name}"
            serving.run(failure_of(serving.replica.start(), ConfigError, what), what)
            assert not serving.replica.stats().serving, f"expected nothing to be served after {what}"
            serving.close()

    def test_close_may_be_called_at_any_time_and_twice(self, make: ServingMaker, versions: Versions) -> None:
        """Before the start, and with requests in flight, which end by a typed error; later requests are refused."""
        path = versions.path(self.models[0])
        make(path).close()
        serving = make(path)
        serving.start()

        async def close() -> None:
            replica = serving.replica
            in_flight = [asyncio.create_task(replica.generate("r", PROMPT, 768)) for _ in range(3)]
            await serving.tokens(3, in_flight)
            await replica.close()
            for task in in_flight:
                await failure_of(task, WeightlaneError, "a request in flight at close")
            await replica.close()
            await failure_of(replica.generate("r", PROMPT, 4), ClosedError, "a request after close")

        serving.run(close(), "close")
        assert not serving.replica.stats().serving, "expected a closed replica not to serve"

    def test_a_closed_engine_leaves_nothing_behind(
        self,
        shared: list[Serving],
        engine_type: type[RolloutEngine],
        versions: Versions,
        weights: Callable[[int], dict[str, torch.Tensor]],
    ) -> None:
        """No threads, processes, descriptors, ports or shared memory remain from one replica to the next in the same process."""
        while shared:
            shared.pop().close()
        segments: set[Any] = set()

        def live() -> None:
            before = segments_of_trees([os.getpid()])
            serving = self._serving(engine_type, versions.path(self.models[0]))
            try:
                self.begin(serving, weights(0))
                serving.serve(weights(1))
                serving.greedy()
                segments.update(segments_of_trees([os.getpid()]) - before)
            finally:
                serving.close()

        for _ in range(2):  # afterwards, everything that is loaded once or kept for the next engine is there
            live()
        before = count()
        live()
        expect_no_more(["the process"], before, count, "of a closed replica", self.slack_s)
        left = [str(segment) for segment in segments if segment.exists()]
        assert not left, f"expected no shared memory to be left of a closed replica, there is {', '.join(left)}"
