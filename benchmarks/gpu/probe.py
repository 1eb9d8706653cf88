"""Says as JSON what this Python has of what `make gpu` needs; a process of its own, which a broken torch may end."""

from __future__ import annotations

import importlib
import importlib.util
import json
import platform
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

PACKAGES = ("numpy", "pydantic", "pluggy", "fsspec", "xxhash", "typer", "rich", "pytest", "hypothesis")
"""Packages that weightlane, its command and its tests import beside torch. Their pip names are their import names."""
OPTIONAL = ("triton", "vllm", "safetensors", "transformers", "megatron")
_DRIVER = re.compile(r"Kernel Module.*?\s(\d+\.\d+(?:\.\d+)?)\s")


def look() -> dict[str, Any]:
    """Versions, devices and missing packages of this Python, as plain data."""
    return {
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "missing": {name: why for name in PACKAGES if (why := _why_not(name))},
        "optional": [name for name in OPTIONAL if importlib.util.find_spec(name) is not None],
        **_torch(),
    }


def _why_not(name: str) -> str:
    try:
        importlib.import_module(name)
    except Exception as error:  # noqa: BLE001 - a broken package may raise anything
        return f"{type(error).__name__}: {error}"
    return ""


def _torch() -> dict[str, Any]:
    if why := _why_not("torch"):
        return {"torch": "", "torch_missing": why, "devices": []}
    import torch

    devices = []
    if torch.cuda.is_available():
        for index in range(torch.cuda.device_count()):
            properties = torch.cuda.get_device_properties(index)
            devices.append({"name": properties.name, "memory_bytes": properties.total_memory})
    return {
        "torch": torch.__version__,
        "cuda": torch.version.cuda or "",
        "nccl": ".".join(map(str, torch.cuda.nccl.version()))
        if devices and torch.distributed.is_nccl_available()
        else "",
        "driver": _driver() if devices else "",
        "devices": devices,
    }


def _driver() -> str:
    try:
        found = _DRIVER.search(Path("/proc/driver/nvidia/version").read_text(encoding="utf-8", errors="replace"))
        if found:
            return found[1]
        asked = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        answer = subprocess.run(asked, capture_output=True, text=True, timeout=20, check=False)  # noqa: S603
        return answer.stdout.split("\n")[0].strip()
    except (OSError, subprocess.TimeoutExpired):
        return ""


if __name__ == "__main__":
    sys.stdout.write(json.dumps(look()) + "\n")
