"""Makes this folder's helper modules importable, here and in the vLLM processes that tests start (they inherit sys.path)."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
