"""The type checker sees the folders under the name that they have in the wheel."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("ckpt_engines", "sync", "trainer", "rollout", "plugins", "cli")


def test_the_type_checkers_links_point_at_the_folders() -> None:
    for folder in FOLDERS:
        assert (ROOT / ".ns/weightlane" / folder).resolve() == ROOT / folder
