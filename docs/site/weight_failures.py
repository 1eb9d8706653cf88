"""Makes the page of known ways in which weights go wrong from ``tests/packaging/weight_failures.toml``, which names the tests.

``python docs/site/weight_failures.py`` writes the page.
"""

from __future__ import annotations

import tomllib
from collections import Counter
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs/reference/ways-weights-go-wrong.md"
OUTCOMES = ("same bits", "refused", "not covered")
HEAD = """# Ways weights go wrong

For engineers of trainers and inference engines, and for anyone who debugs a run: {all} known ways in which a rollout gets wrong
weights, from the public trackers of other software, and what weightlane does.

- **same bits** ({same bits}): the rollout has, bit for bit, the weights of the version, or computes what these weights compute.
- **refused** ({refused}): a typed error that names the tensor, setting or rank. Nobody is served with wrong weights. What to do:
  [Troubleshooting](../troubleshooting.md#every-error).
- **not covered** ({not covered}): no test shows what happens.

`make test` runs every test that is named here, on CPUs; none has run vLLM on a GPU. Links lead to files of tests, and their
titles name the tests. A report describes the way or a repair of it, and may be closed by now.
`python docs/site/weight_failures.py` makes this page from
[a list of ways and tests](../../tests/packaging/weight_failures.toml "tests/packaging/weight_failures.toml"). If you know another
way, add it there: with a test, or as "not covered".
"""


def failures() -> dict[str, list[dict[str, Any]]]:
    """The ways of each group."""
    found: dict[str, list[dict[str, Any]]] = tomllib.loads((ROOT / "tests/packaging/weight_failures.toml").read_text())
    return found


def _row(way: dict[str, Any]) -> str:
    says = f"**{way['outcome']}**" + (f": `{way['error']}`" if "error" in way else "") + ". "
    names: dict[str, list[str]] = {}
    for file, _, name in (test.partition("::") for test in way["tests"]):
        names.setdefault(file, []).append(name)
    tests = [f'[{Path(file).stem}](../../{file} "{", ".join(each)}")' for file, each in names.items()]
    reports = [
        f"[{report}](https://github.com/{report.replace('#', '/issues/')})"  # GitHub leads on to a pull request
        for report in way["reports"]
    ]
    cells = (f"**{way['name']}.** {way['what']}", says + way.get("note", ""), ", ".join(tests), ", ".join(reports))
    return f"| {' | '.join(map(str.strip, cells))} |\n"


def page() -> str:
    """The page's Markdown."""
    groups = failures()
    counts = Counter(way["outcome"] for ways in groups.values() for way in ways)
    text = HEAD.format_map({**dict.fromkeys(OUTCOMES, 0), **counts, "all": counts.total()})
    for group, ways in groups.items():
        text += f"\n## {group}\n\n| what goes wrong | weightlane | shown by | reported in |\n|---|---|---|---|\n"
        text += "".join(map(_row, ways))
    return text


if __name__ == "__main__":
    PAGE.write_text(page())
