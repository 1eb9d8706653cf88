"""Engines that are wrong in one way each, all in one place: ``broken_engines.py:NAME``."""

from __future__ import annotations

import sys
from pathlib import Path

# The suite loads this file by its path, in processes that know no more of it.
sys.path.insert(0, str(Path(__file__).parent))

from broken_conduct import *  # noqa: F403
from broken_data import *  # noqa: F403
from broken_wrappers import *  # noqa: F403
