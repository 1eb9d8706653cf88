"""vLLM's CPU build computes in one of three ways: AVX2, AVX-512, or AMX. The processes of tests do not use AMX.

Most of vLLM asks ``torch.cpu._is_amx_tile_supported()``, whose answer `process_starts/sitecustomize.py` changes. oneDNN, a copy
of which is in torch and another in vLLM's kernels, looks at the CPU by itself, and is limited by an environment variable.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

AMX_ENV = "WEIGHTLANE_TEST_AMX"
"""``make test`` with ``WEIGHTLANE_TEST_AMX=1`` lets every process use AMX; see `process_starts/sitecustomize.py`."""
WITHOUT_AMX = {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE_FP16"}
"""The newest instructions before AMX. On a CPU that lacks them oneDNN takes the newest that it has, as without the variable."""
WITH_AMX = {AMX_ENV: "1", "ONEDNN_MAX_CPU_ISA": "DEFAULT"}
"""Environment of a process that may use AMX."""


def amx_is_hidden() -> bool:
    return os.environ.get(AMX_ENV) != "1"


def cpu_has_amx() -> bool:
    """Whether this CPU has AMX, hidden or not."""
    return "amx_tile" in Path("/proc/cpuinfo").read_text().split()


def cpu_path() -> dict[str, Any]:
    """Which path this process takes: who says whether there is AMX, what they say, and how oneDNN is limited."""
    torch = sys.modules["torch"]
    return {
        "asked": torch.cpu.get_capabilities.__module__,
        "amx": torch.cpu._is_amx_tile_supported(),
        "environment": {name: os.environ[name] for name in WITH_AMX if name in os.environ},
    }


def hide_amx() -> None:
    """Let no process that starts after this call use AMX, unless the user has asked for it."""
    os.environ.update(WITHOUT_AMX if amx_is_hidden() else WITH_AMX)
