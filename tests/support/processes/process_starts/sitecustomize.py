"""Python imports this module in every process of the tests. It notes expensive starts, and hides the CPU's AMX.

`budget` puts this folder on the path of every process, and compares what was noted with what each folder may start.
"""

from __future__ import annotations

import functools
import importlib
import importlib.machinery
import os
import sys
from collections.abc import Callable
from typing import Any

LOG_ENV = "WEIGHTLANE_TEST_STARTS"
AMX_ENV = "WEIGHTLANE_TEST_AMX"
"""Environment variable of the processes that may use AMX: ``1``. It is read on each call, since a forked process has imported
torch before it gets its own environment."""


def note(kind: str) -> None:
    """Write a line: what was started, and by which test file."""
    if log := os.environ.get(LOG_ENV):
        test = os.environ.get("PYTEST_CURRENT_TEST", "").partition("::")[0]
        with open(log, "a") as file:  # noqa: PTH123 - pathlib takes time to import, in every process
            file.write(f"{kind}\t{test}\n")


def _after(kind: str, owner: Any, name: str, counts: Callable[..., bool] = lambda *_, **__: True) -> None:
    """Note `kind` whenever a function that `counts` ends well."""
    function = getattr(owner, name)

    @functools.wraps(function)
    def noting(*arguments: Any, **named: Any) -> Any:
        result = function(*arguments, **named)
        if counts(*arguments, **named):
            note(kind)
        return result

    setattr(owner, name, noting)


def _first_rank(*_: Any, rank: int = -1, **__: Any) -> bool:
    return (rank if rank >= 0 else int(os.environ.get("RANK", "0"))) == 0


def _fork_ray(services: Any) -> None:
    """Let Ray fork its workers, if this process was forked: what they need is imported here."""
    if "fork_server" in sys.modules:
        importlib.import_module("ray_workers").fork_them(services)


def _note_vllm(_: Any) -> None:
    """vLLM looks at each class of models in a process of its own, once on a machine: what a new one starts does not count."""
    if "vllm.model_executor.models.registry" not in sys.orig_argv:
        note("vllm imports")


def _hide_amx(module: Any) -> None:
    """Let torch say that the CPU has no AMX, which decides how vLLM computes: see "CPUs" in `tests/README.md`."""
    everything, init = module.get_capabilities, module._init_amx

    def get_capabilities() -> Any:
        found = everything()
        if os.environ.get(AMX_ENV) == "1":
            return found
        return {name: False if name.startswith("amx") else value for name, value in found.items()}

    module.get_capabilities = get_capabilities
    module._init_amx = lambda: os.environ.get(AMX_ENV) == "1" and init()


_ON_IMPORT: dict[str, Callable[[Any], None]] = {
    "torch.cpu": _hide_amx,
    "vllm": _note_vllm,
    "vllm.v1.engine.core": lambda module: _after("vllm engines", module.EngineCore, "__init__"),
    "ray._private.services": lambda module: (_after("ray clusters", module, "start_gcs_server"), _fork_ray(module)),
    "torch.distributed.distributed_c10d": lambda module: _after(
        "torch groups", module, "init_process_group", _first_rank
    ),
}


class _Finder:
    """Finds modules as Python does, and lets those of `_ON_IMPORT` be looked at when they are imported."""

    @staticmethod
    def find_spec(name: str, path: Any = None, target: Any = None) -> Any:
        look = _ON_IMPORT.get(name)
        spec = importlib.machinery.PathFinder.find_spec(name, path) if look else None
        if spec is None or spec.loader is None:
            return None
        execute = spec.loader.exec_module

        def exec_module(module: Any) -> None:
            execute(module)
            look(module)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


# No audit hook, which would be simpler: memray, with which a test looks at memory, crashes where there is one.
if LOG_ENV in os.environ:
    sys.meta_path.insert(0, _Finder)  # type: ignore[arg-type]
