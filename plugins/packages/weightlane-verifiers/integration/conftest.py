"""Finds the helpers of this repository's tests (`tests/support/helper_paths.py`), and prepares the Hangman example once."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

os.environ |= {
    "OMP_NUM_THREADS": "1",
    "TORCH_COMPILE_DISABLE": "1",
}  # before torch is imported; the programs inherit it

sys.path.insert(0, str(Path(__file__).resolve().parents[4] / "tests/support"))
import helper_paths  # noqa: F401
from run_process import StartRun, starting
from waiting import HANG_S

HERE = Path(__file__).resolve().parent

# The servers of verifiers import this folder's taskset, too.
sys.path.insert(0, str(HERE))
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(HERE), os.environ.get("PYTHONPATH"))))


def pytest_configure(config: pytest.Config) -> None:
    """Let verifiers, and what it imports, warn as they like: this repository's own tests turn warnings into errors."""
    config.addinivalue_line("filterwarnings", "default")


@pytest.fixture(scope="session")
def hangman(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that the example's preparation makes. NLTK, which is not imported yet, reads its words."""
    folder = tmp_path_factory.mktemp("hangman") / "task"
    prepare = [sys.executable, str(HERE.parent / "example/prepare.py"), "--out", str(folder)]
    subprocess.run(prepare, check=True, timeout=HANG_S, stdout=subprocess.DEVNULL)
    os.environ["NLTK_DATA"] = str(folder / "nltk")
    return folder


@pytest.fixture
def start_run(tmp_path: Path) -> Iterator[StartRun]:
    yield from starting(tmp_path)
