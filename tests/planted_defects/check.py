"""Plants defects in the product, one after the other, and tells which of them the tests find.

    python tests/planted_defects/check.py [NN ...]

Each ``NN-name.patch`` breaks one promise in one place. `list.tsv` says which, and names the tests that should find it.
The checkout must be clean; it is left so.
"""

from __future__ import annotations

import csv
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
TIMEOUT_S = 300
"""Of a test, which fails then and ends what it has started; all of them have twice as long."""
FOUND = 1
"""pytest's exit code when a test has failed; others mean that none ran, or that something else is wrong."""


def git(*arguments: str) -> int:
    return subprocess.run(["git", "-C", str(ROOT), *arguments], check=False).returncode


def outcome(patch: Path, tests: list[str]) -> str:
    if git("apply", str(patch)):
        return "the patch does not apply"
    try:
        options = ["-q", "-x", "-p", "no:cacheprovider", "--timeout", str(TIMEOUT_S)]
        pytest = [sys.executable, "-m", "pytest", *options, *tests]
        code = subprocess.run(
            pytest, cwd=ROOT, stdout=subprocess.DEVNULL, timeout=2 * TIMEOUT_S, check=False
        ).returncode
    except subprocess.TimeoutExpired:
        return "found: the tests hang"
    finally:
        git("apply", "-R", str(patch))
    return {0: "NOT FOUND", FOUND: "found"}.get(code, f"pytest ended with {code}")


def main() -> None:
    assert not git("diff", "--quiet"), "commit or stash your changes first"
    with (HERE / "list.tsv").open() as file:
        rows = {row["NN"]: row for row in csv.DictReader(file, delimiter="\t")}
    for number in sys.argv[1:] or rows:
        (patch,) = HERE.glob(f"{number}-*.patch")
        print(f"{patch.stem:<45}{outcome(patch, rows[number]['tests'].split())}", flush=True)


if __name__ == "__main__":
    main()
