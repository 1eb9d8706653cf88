"""The server that forks participants imports this, and reads the environment's entry points for all of them: 40 ms each time."""

from __future__ import annotations

import functools
import importlib.metadata

from weightlane.ckpt_engines import registry
from weightlane.plugins import loading

read_once = functools.cache(importlib.metadata.entry_points)
for module, group in ((registry, registry.GROUP), (loading, loading.ENTRY_POINT_GROUP)):
    read_once(group=group)
    module.entry_points = read_once  # type: ignore[attr-defined]
