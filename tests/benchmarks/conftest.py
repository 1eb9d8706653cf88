"""The benchmarks, which belong to the checkout and are never installed."""

from __future__ import annotations

import importlib
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]
PROBE = (
    "ip link add wlbridge type bridge && ip link add wl0 type veth peer name wl1 && ip link set wl1 master wlbridge"
    " && tc qdisc add dev wl0 root tbf rate 1mbit burst 64kb latency 50ms"
)


@pytest.fixture
def load_benchmark(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], ModuleType]:
    """Gives a module of `benchmarks` by its name there."""
    monkeypatch.syspath_prepend(str(ROOT))
    return lambda name: importlib.import_module(f"benchmarks.{name}")


@pytest.fixture
def networks(load_benchmark: Callable[[str], ModuleType]) -> ModuleType:
    """Where benchmarks have limited links from."""
    return load_benchmark("networks")


@pytest.fixture
def limited_links(networks: ModuleType) -> None:
    """Skips, with the reason, where no link can be limited."""
    if reason := networks.missing():
        pytest.skip(reason)
    if (unshare := shutil.which("unshare")) is None:
        pytest.skip("unshare, of util-linux, not found")
    done = subprocess.run([unshare, "--net", "sh", "-c", PROBE], capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"this system makes no limited links: {done.stderr.strip()}")
