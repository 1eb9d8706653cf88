"""Reports disabled plugins to the user: a warning in the log, and a line in a file that a run's processes share."""

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
"""Environment variable with the file to which every process of a run appends its reports. If unset, only the log has them."""

_LINE = re.compile(r"[-\d]+ [:\d]+ process \d+ reports: (.*)")

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class HookReport:
    """A plugin that was disabled in this process, or could not be loaded."""

    plugin: str
    hook: str
    """The hook that raised; empty if the plugin could not be loaded."""
    error: str
    """Type and text of the exception."""

    def __str__(self) -> str:
        """Return the report as one line."""
        problem = f"was disabled: {self.hook} raised" if self.hook else "is not used:"
        return " ".join(f"plugin {self.plugin} {problem} {self.error}".split())


def reported_in(file: Path) -> list[str]:
    """Return the reports in a file that `record` wrote, in the order of the file; none if there is no such file."""
    try:
        lines = file.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []
    return [found[1] for line in lines if (found := _LINE.match(line))]


def record(report: HookReport, error: Exception) -> None:
    """Log `report`, and append it with the traceback of `error` to the run's file if there is one."""
    _log.warning("%s", report)
    path = os.environ.get(REPORT_FILE_ENV)
    if not path:
        return
    trace = "".join(traceback.format_exception(error))
    text = f"{time.strftime('%Y-%m-%d %H:%M:%S')} process {os.getpid()} reports: {report}\n{trace}\n"
    with suppress(OSError):  # the log has the report, and a full disk fails elsewhere too
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        with Path(path).open(
            "a", encoding="utf-8"
        ) as file:  # one write per report, because processes append at the same time
            file.write(text)
