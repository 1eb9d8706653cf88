"""Plugins are found where distributions register them, and one that cannot be loaded is reported and left out."""

from __future__ import annotations

import importlib
import json
from pathlib import Path
from typing import Any

import pytest
from installed import install

from weightlane.plugins import make_hooks

CLASS = """
from weightlane.plugins import hookimpl

class Observer:
    def __init__(self):
        self.heard = []

    @hookimpl
    def version_committed(self, version):
        HEARD.append(("class", version))

HEARD = []
"""
MODULE = """
from weightlane.plugins import hookimpl

HEARD = []

@hookimpl
def version_committed(version, facts):
    HEARD.append(("module", version))
"""


def test_classes_and_modules_are_found_by_entry_point_and_one_that_cannot_be_had_is_reported_with_its_distribution(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(tmp_path, "wl_broken_plugin", "import no_such_module", "broken = wl_broken_plugin")
    install(tmp_path, "wl_failing_plugin", "class Fails:\n    def __init__(self): 1 / 0", "f = wl_failing_plugin:Fails")
    install(tmp_path, "wl_absent_plugin", "", "absent = wl_absent_plugin:Missing")
    install(tmp_path, "wl_class_plugin", CLASS, "watcher = wl_class_plugin:Observer")
    monkeypatch.syspath_prepend(tmp_path)
    make_hooks()
    install(tmp_path, "wl_module_plugin", MODULE, "other = wl_module_plugin")  # while this process runs
    hooks = make_hooks()
    hooks.version_committed(version=4, facts={})
    absent = "module 'wl_absent_plugin' has no attribute 'Missing'"
    assert importlib.import_module("wl_class_plugin").HEARD == [("class", 4)]
    assert importlib.import_module("wl_module_plugin").HEARD == [("module", 4)]
    assert sorted(str(report) for report in hooks.reports) == [
        "plugin absent (wl_absent_plugin 1.0) is not used: AttributeError: " + absent,
        "plugin broken (wl_broken_plugin 1.0) is not used: ModuleNotFoundError: No module named 'no_such_module'",
        "plugin f (wl_failing_plugin 1.0) is not used: ZeroDivisionError: division by zero",
    ]


PROGRAM = """
import json, os, sys, threading
from weightlane.plugins import process_hooks
made = []
threads = [threading.Thread(target=lambda: made.append(process_hooks())) for _ in range(4)]
[thread.start() for thread in threads]; [thread.join() for thread in threads]
hooks = process_hooks()
hooks.snapshot_taken(version=3, facts={"seconds": 0.25, "nbytes": 8, "participant": "trainer-0"})
child = os.fork()
if child == 0:
    same = process_hooks() is hooks
    hooks.snapshot_taken(version=4, facts={"seconds": 0.25, "nbytes": 8, "participant": "trainer-0"})
    process_hooks().version_staged(version=4, facts={"seconds": 0.25, "nbytes": 8, "participant": "rollout-0/0"})
    os._exit(same)
status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
print(json.dumps({"same": len(set(map(id, made))), "reports": list(map(str, hooks.reports)), "forked": status,
    "heavy": sorted({"torch", "ray", "vllm", "tensorboardX", "prometheus_client"} & set(sys.modules))}))
"""


def test_a_program_gets_its_hooks_once_with_the_observers_its_environment_asks_for(
    tmp_path: Path, children: Any
) -> None:
    """In a process of its own: hooks are made once per process, and anew in a forked child."""
    trace = tmp_path / "trace.json"
    env = {"WEIGHTLANE_TRACE": str(trace), "WEIGHTLANE_PROMETHEUS": "0.0.0.0:0"}
    code, out, err = children.run(["-c", PROGRAM], env=env, cwd=tmp_path)
    assert code == 0, err
    found = json.loads(out)
    assert (found["same"], found["forked"]) == (1, 0)
    (report,) = found["reports"]
    assert report.startswith(
        "plugin prometheus (requested by WEIGHTLANE_PROMETHEUS) is not used: ValueError: 0.0.0.0 is not"
    )
    assert "WEIGHTLANE_PROMETHEUS_TOKEN" in report
    assert report in err, "without a handler Python prints warnings"
    assert found["heavy"] == [], "what nobody asked for is not even imported"
    code, out, err = children.run(["-m", "weightlane.plugins.trace.merge", str(trace)], cwd=tmp_path)
    assert (code, out) == (0, f"{trace}: 3 events of 3 processes\n"), err
    code, out, err = children.run(["-m", "weightlane.plugins.trace.merge", str(trace)], cwd=tmp_path)
    assert (code, out, err) == (1, "", f"error: there are no parts of a trace in {trace}.parts\n")
