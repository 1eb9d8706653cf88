"""Deadlines of syncs that no busy machine misses."""

from __future__ import annotations

from waiting import HANG_S

PATIENT: dict[str, float] = dict.fromkeys(("deadline_s", "connect_timeout_s", "stall_s", "rejoin_s"), HANG_S)
"""For `SyncConfig`."""
