"""Plants defects in the product, one after the other, and tells which of them the tests find.

    python tests/planted_defects/check.py [NAME ...]

Each defect of `defects.toml` breaks one promise in one place, and names the tests that should find it. NAME is the beginning of a
defect's name. The checkout must be clean; it is left so.
"""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
TIMEOUT_S = 300
"""Seconds that one test may take before it fails and ends what it has started. A defect's tests have twice as long in all."""
FOUND = 1
"""pytest's exit code when a test has failed; others mean that none ran, or that something else is wrong."""


def defects() -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = tomllib.loads((HERE / "defects.toml").read_text())["defect"]
    return found


def planted(defect: dict[str, Any]) -> dict[Path, str]:
    """The text of each file with the defect in it. Raises `ValueError` where the code that is to be broken is not there once."""
    texts: dict[Path, str] = {}
    for edit in defect["edit"]:
        path = ROOT / edit["file"]
        text = texts.get(path) or path.read_text()
        if (count := text.count(edit["find"])) != 1:
            raise ValueError(f"{edit['file']} has the code that is to be broken {count} times")
        texts[path] = text.replace(edit["find"], edit["replace"])
    return texts


def outcome(defect: dict[str, Any]) -> str:
    texts = planted(defect)
    whole = {path: path.read_text() for path in texts}
    try:
        for path, text in texts.items():
            path.write_text(text)
        options = ["-q", "-x", "-p", "no:cacheprovider", "--timeout", str(TIMEOUT_S)]
        pytest = [sys.executable, "-m", "pytest", *options, *defect["tests"]]
        code = subprocess.run(
            pytest, cwd=ROOT, stdout=subprocess.DEVNULL, timeout=2 * TIMEOUT_S, check=False
        ).returncode
    except subprocess.TimeoutExpired:
        return "found: the tests hang"
    finally:
        for path, text in whole.items():
            path.write_text(text)
    return {0: "NOT FOUND", FOUND: "found"}.get(code, f"pytest ended with {code}")


def main() -> None:
    dirty = subprocess.run(["git", "-C", str(ROOT), "diff", "--quiet"], check=False).returncode
    assert not dirty, "commit or stash your changes first"
    for defect in defects():
        if not sys.argv[1:] or defect["name"].startswith(tuple(sys.argv[1:])):
            print(f"{defect['name']:<45}{outcome(defect)}", flush=True)


if __name__ == "__main__":
    main()
