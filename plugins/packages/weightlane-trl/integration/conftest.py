"""Finds the helpers of this repository's tests; see `tests/support/helper_paths.py`."""

import os
import sys
from pathlib import Path

os.environ |= {
    "OMP_NUM_THREADS": "1",
    "TORCH_COMPILE_DISABLE": "1",
}  # before torch is imported; the programs inherit it

sys.path.insert(0, str(Path(__file__).resolve().parents[4] / "tests/support"))
import helper_paths  # noqa: F401
