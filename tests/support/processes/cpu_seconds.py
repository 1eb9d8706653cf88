"""CPU seconds and processes of a whole run of the tests, by folder.

    python tests/support/processes/cpu_seconds.py make test-all

Looks at every process of the machine several times a second. A process belongs to the test that ran when it started, which pytest
keeps in the environment; pytest's own processes are listed as such. What lives for less than a tenth of a second is missed.
Works on any checkout.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
from budget import folder_of

POLL_S = 0.1
_TICKS = os.sysconf("SC_CLK_TCK")
_LIBRARIES = {b"/vllm/": "vllm", b"libtorch_cpu": "torch"}
_OWN = "(pytest)"


@dataclass
class _Process:
    folder: str
    cpu_s: float = 0.0
    holds: set[str] = field(default_factory=set)
    looked: int = 0


def _read(path: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError:
        return b""


def _look(seen: dict[tuple[int, int], _Process], marker: bytes) -> None:
    for entry in os.listdir("/proc"):  # noqa: PTH208 - thousands of times
        if not entry.isdigit() or not (stat := _read(f"/proc/{entry}/stat")):
            continue
        numbers = stat[stat.rindex(b")") + 2 :].split()
        key = int(entry), int(numbers[19])
        if key not in seen:
            environment = _read(f"/proc/{entry}/environ")
            if marker not in environment:
                continue
            test = re.search(rb"PYTEST_CURRENT_TEST=([^\0:]*)", environment)
            seen[key] = _Process(folder_of(test[1].decode()) if test else _OWN)
        process = seen[key]
        process.cpu_s = (int(numbers[11]) + int(numbers[12])) / _TICKS
        process.looked += 1
        if process.looked.bit_count() == 1:  # rarer and rarer
            if b"gcs_server" in _read(f"/proc/{entry}/cmdline"):
                process.holds.add("ray")
            maps = _read(f"/proc/{entry}/maps")
            process.holds |= {name for library, name in _LIBRARIES.items() if library in maps}


def main() -> None:
    marker = f"WEIGHTLANE_CPU_SECONDS={os.getpid()}"
    began = time.monotonic()
    run = subprocess.Popen(sys.argv[1:], env={**os.environ, **dict([marker.split("=")])})
    seen: dict[tuple[int, int], _Process] = {}
    while run.poll() is None:
        _look(seen, marker.encode())
        time.sleep(POLL_S)
    by_folder: dict[str, list[_Process]] = defaultdict(list)
    for process in seen.values():
        by_folder[process.folder].append(process)
    print(f"\n{'folder':<18}{'CPU s':>8}{'processes':>11}{'with torch':>12}{'with vLLM':>11}{'Ray':>5}")
    totals: Counter[str] = Counter()
    for folder, processes in sorted(by_folder.items(), key=lambda item: -sum(process.cpu_s for process in item[1])):
        holds = Counter(name for process in processes for name in process.holds)
        cpu_s = sum(process.cpu_s for process in processes)
        totals.update(holds, cpu_s=cpu_s, processes=len(processes))
        print(_line(folder, Counter(holds, cpu_s=cpu_s, processes=len(processes))))
    print(_line(f"{time.monotonic() - began:.0f} s in all", totals))
    sys.exit(run.returncode)


def _line(name: str, counts: Counter[str]) -> str:
    numbers = f"{counts['processes']:>11}{counts['torch']:>12}{counts['vllm']:>11}{counts['ray']:>5}"
    return f"{name:<18}{counts['cpu_s']:>8.0f}{numbers}"


if __name__ == "__main__":
    main()
