"""Questions of `test_registry.py` to a registry in a forked child, in which further distributions are installed."""

from __future__ import annotations

import sys
from typing import Any

from weightlane.ckpt_engines import CheckpointEngineRegistry, WeightlaneError
from weightlane.ckpt_engines.runtime.json_socket import JsonSocket


def probe(answers: JsonSocket, site: str) -> None:
    """Run in a child: report names and rows of the registry, and the error of every engine in `site`, with faults and without."""
    known = CheckpointEngineRegistry().names()
    sys.path.insert(0, site)
    registry, before = CheckpointEngineRegistry(), set(sys.modules)
    found: dict[str, Any] = {"names": registry.names()}
    found["imported"] = [
        name for name in set(sys.modules) - before if name.startswith("acme") or ".ckpt_engines.engines." in name
    ]
    options = {"good": {"lanes": 3}, "faulty:good": {"inner": {"lanes": 3}}}
    of_others = set(registry.names()) - set(known)
    for name in [*of_others, *(f"faulty:{name}" for name in of_others)]:
        try:
            registry.create(name, options.get(name, {}))
            found[name] = None
        except WeightlaneError as error:
            found[name] = error.to_wire()
    found["rows"] = [
        [row.name, row.distribution, row.capabilities is not None, row.unavailable] for row in registry.list()
    ]
    answers.send(found)
