"""The benchmarks, which belong to the checkout and are never installed."""

from __future__ import annotations

import importlib
import pkgutil
import shutil
import subprocess
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
PROBE = (
    "ip link add wlbridge type bridge && ip link add wl0 type veth peer name wl1 && ip link set wl1 master wlbridge"
    " && tc qdisc add dev wl0 root tbf rate 1mbit burst 64kb latency 50ms"
)


@pytest.fixture(scope="module", autouse=True)
def forked_helpers() -> None:
    """Processes of benchmarks are children of the thread that starts them, whose network namespace is theirs: none is forked."""


def benchmark(name: str) -> Any:
    """A fixture that gives a module of `benchmarks`."""

    @pytest.fixture
    def module(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
        monkeypatch.syspath_prepend(str(ROOT))
        found = importlib.import_module(f"benchmarks.{name}")
        for part in pkgutil.iter_modules(getattr(found, "__path__", ()) if name == "gpu" else ()):
            if part.name != "vllm_server":  # which takes vLLM's packages
                importlib.import_module(f"benchmarks.{name}.{part.name}")
        return found

    return module


control_plane = benchmark("control_plane")
decoding = benchmark("decode_while_syncing")
density = benchmark("density")
direct = benchmark("direct")
gpu = benchmark("gpu")
networks = benchmark("networks")
peers = benchmark("peers.runner")
plan_scale = benchmark("plan_scale")
slow_link = benchmark("slow_link")
small_tensors = benchmark("small_tensors")
version_cost = benchmark("version_cost")


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
