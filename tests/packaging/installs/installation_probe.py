"""A program for a bare environment: imports what is installed and runs commands, all in this process. Talks JSON.

Reads from standard input the arguments of commands, and the public packages to import; writes what came of each.
"""

from __future__ import annotations

import importlib.util
import json
import os
import pkgutil
import sys
import traceback
from typing import Any

HEAVY = ("asyncio", "numpy", "ray", "torch", "transformers", "vllm")
"""Packages that no help and no refusal needs, each slow to import."""


def imported(name: str) -> str:
    """Import a package with all that it offers: the names in its `__all__`, or its modules. Returns the error, or nothing."""
    try:
        package = importlib.import_module(name)
        for each in getattr(package, "__all__", ()):
            getattr(package, each)
        if not hasattr(package, "__all__"):
            for module in pkgutil.walk_packages(getattr(package, "__path__", ()), f"{name}."):
                importlib.import_module(module.name)
    except Exception:  # noqa: BLE001 - whatever it is, the test shows it
        return traceback.format_exc()
    return ""


def ran(arguments: list[str]) -> dict[str, Any]:
    """Run a command as a user would. Returns its exit code and everything that it printed, a traceback included."""
    from typer.testing import CliRunner

    from weightlane.cli.main import app

    result = CliRunner().invoke(app, arguments, env={"COLUMNS": "300"}, prog_name="weightlane")
    output = result.output
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        output += "".join(traceback.format_exception(result.exception))
    return {"code": result.exit_code, "output": output}


def main() -> None:
    """Help and refusals first, since they must import little; last what takes longest."""
    asked = json.load(sys.stdin)
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever a library prints
    told: dict[str, Any] = {name: [ran(command) for command in asked[name]] for name in ("light", "refused")}
    told["heavy"] = sorted(name for name in HEAVY if name in sys.modules)
    told["working"] = [ran(command) for command in asked["working"]]
    told["vllm"] = "vllm" in sys.modules
    told["imports"] = [imported(name) for name in asked["imports"]]
    told["origin"] = importlib.util.find_spec("weightlane.sync").origin
    json.dump(told, answers)


if __name__ == "__main__":
    main()
