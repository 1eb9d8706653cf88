"""Installs a distribution with entry points into a folder, the way an installer would leave it."""

from __future__ import annotations

from pathlib import Path


def install(site: Path, name: str, source: str, entry_points: str, group: str = "weightlane.plugins") -> None:
    """Lay down module ``<name>.py`` and the metadata of distribution ``<name>`` 1.0 with these entry points."""
    site.mkdir(parents=True, exist_ok=True)
    (site / f"{name}.py").write_text(source)
    info = site / f"{name}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[{group}]\n{entry_points}\n")
    (info / "RECORD").write_text(f"{name}.py,,\n{name}-1.0.dist-info/METADATA,,\n")
