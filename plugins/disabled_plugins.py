"""How a user learns that a plugin was disabled: a warning in the log, and a line in a file that a run's processes share."""

from __future__ import annotations

import logging
import os
import re
import time
import traceback
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

REPORT_FILE_ENV = "WEIGHTLANE_PLUGIN_LOG"
"""Names the file to which every process of a run appends its reports; unset, there are none but those in the log."""

_LINE = re.compile(r"[-\d]+ [:\d]+ process \d+ reports: (.*)")

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class HookReport:
    """A plugin that is not called any more, or not at all, in this process."""

    plugin: str
    hook: str
    """The hook that raised; empty when the plugin could not even be loaded."""
    error: str
    """Type and text of what it raised."""

    def __str__(self) -> str:
        """One line."""
        what = f"was disabled: {self.hook} raised" if self.hook else "is not used:"
        return " ".join(f"plugin {self.plugin} {what} {self.error}".split())


def reported_in(file: Path) -> list[str]:
    """The reports in a file that `record` wrote, in their order; none when there is no such file."""
    try:
        lines = file.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []
    return [found[1] for line in lines if (found := _LINE.match(line))]


def record(report: HookReport, error: Exception) -> None:
    """Log `report`, and append it with the traceback of `error` to the file of the run, if there is one."""
    _log.warning("%s", report)
    path = os.environ.get(REPORT_FILE_ENV)
    if not path:
        return
    trace = "".join(traceback.format_exception(error))
    text = f"{time.strftime('%Y-%m-%d %H:%M:%S')} process {os.getpid()} reports: {report}\n{trace}\n"
    with suppress(OSError):  # a full disk has its own ways to be noticed
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        with Path(path).open("a", encoding="utf-8") as file:  # one write: processes append side by side
            file.write(text)
