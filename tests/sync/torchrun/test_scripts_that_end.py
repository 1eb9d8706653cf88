"""A script that publishes may end in any way and at any time: its exit status and its output stay its own."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

ENDED = {
    "published:exception": (1, "ValueError: mine"),
    "published:interrupt": (-2, "KeyboardInterrupt"),
    "published:fork": (0, ""),
    "committing:file": (0, ""),
    "committing:terminate": (-15, ""),
    "member:exit": (3, ""),
    "member:forgotten": (0, ""),
}
"""Exit status, and the last line of the standard error, by how far a script has come and how it ends."""


def test_a_script_that_ends_before_it_closes_keeps_its_exit_status_and_says_nothing_of_ours(
    children: Any, tmp_path: Path
) -> None:
    """It leaves no process behind, and nothing in the folder of sockets; shared memory has no names."""
    script = str(Path(__file__).with_name("scripts_that_end.py"))
    env = {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "SOCKETS": str(tmp_path)}
    status, output, errors = children.run([script, *ENDED], env=env)
    assert status == 0, errors
    answer = json.loads(output)
    assert answer["left"] == list(tmp_path.iterdir()) == []
    for name, (wanted, said) in ENDED.items():
        result = answer["results"][name]
        assert result["status"] == wanted, (name, result)
        # On a slow machine a publisher says that the optimizer waited, once; from 3.12 on Python warns of a fork with threads.
        usual = "the optimizer waited", "use of fork()"
        lines = [line for line in result["said"].splitlines() if not any(each in line for each in usual)]
        assert (lines or [""])[-1] == said, (name, result)
        assert result["said"].count("Traceback") == (1 if said else 0), (name, result)
