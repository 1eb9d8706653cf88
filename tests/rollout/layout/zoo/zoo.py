"""Every architecture of the zoo: what versions leave in a running vLLM is what vLLM makes of their files when it starts.

    python tests/rollout/layout/zoo/zoo.py [KIND ...] [--document FILE]

Three versions of any bits whatever are committed to each model, by the method that was chosen for it and, with `reload`, through
vLLM's own loading; each is compared with an ordinary load of the same files. `test_layout_models.py` runs a handful with every
test run.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[3] / "support"))
import helper_paths  # noqa: F401 - it makes the others importable
from hub_forms import HUB_FORMS
from json_program import Program
from zoo_kind import Kind, make
from zoo_models import KINDS

BEGIN, END = "<!-- made by make test-zoo -->", "<!-- end -->"
WAYS = {"decided": "", "reload": "reload"}


def outcome(process: Program, kind: Kind, dtype: str, way: str, hub: str = "") -> str:
    """Return the way the versions of a model went, why they were refused, or what is wrong."""
    with tempfile.TemporaryDirectory() as folder:
        try:
            model = make(kind, Path(folder) / "model", seed=1, dtype=getattr(torch, dtype))
            return summary(process.call("compare", str(model), dtype, kind.options, WAYS[way], hub))
        except Exception as error:  # noqa: BLE001 - the table says so, and the others go on
            return f"FAILED: {error}"


def summary(answer: dict[str, Any]) -> str:
    """Summarise the answer of `layout_process.compare` in a few words."""
    if "unbuilt" in answer:
        return f"vLLM cannot load it: {answer['unbuilt'].splitlines()[0][:120]}"
    if wrong := answer["started"] + answer["after"] + answer.get("sparse", []):
        return f"WRONG: {', '.join(wrong[:3])}"
    if "refused" in answer:
        return f"refused: {answer['refused'].partition(' would not be right: ')[2].partition('. ')[0] or answer['refused']}"
    return str(answer["way"])


def put_between_marks(document: Path, table: str) -> None:
    """Replace the table of `document`."""
    before, rest = document.read_text().split(BEGIN)
    document.write_text(f"{before}{BEGIN}\n{table}{END}{rest.partition(END)[2]}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kinds", nargs="*", metavar="KIND", help=", ".join(KINDS))
    parser.add_argument("--document", type=Path, help="put the table between this file's marks, too")
    arguments = parser.parse_args()
    if unknown := set(arguments.kinds) - set(KINDS):
        parser.error(f"no such architecture: {', '.join(sorted(unknown))}")
    columns = [(way, dtype) for way in WAYS for dtype in ("float32", "bfloat16")]
    program = Path(__file__).parents[1] / "layout_process.py"
    process = Program(program, env={"VLLM_LOGGING_LEVEL": "ERROR"}, again=True)
    began, rows = time.monotonic(), []
    kinds = [(name, "") for name in arguments.kinds or KINDS]
    kinds += [(form.kind, hub) for hub, form in HUB_FORMS.items() if form.kind in (arguments.kinds or KINDS)]
    for name, hub in kinds:
        outcomes = [outcome(process, KINDS[name], dtype, way, hub) for way, dtype in columns]
        rows.append((f"{name}, from a hub: {hub}" if hub else name, KINDS[name].group, *outcomes))
        print(" | ".join(rows[-1]), flush=True)
    process.kill()
    if arguments.document:
        heads = ("architecture", "kind", *(f"{way}, {dtype}" for way, dtype in columns))
        lines = [heads, ("---",) * len(heads), *rows]
        put_between_marks(arguments.document, "".join(f"| {' | '.join(line)} |\n" for line in lines))
    bad = sum(cell.startswith(("WRONG", "FAILED")) for row in rows for cell in row)
    print(f"{len(rows)} checkpoints, {len(rows) * len(columns)} cases, {bad} wrong, {time.monotonic() - began:.0f} s")
    sys.exit(bool(bad))


if __name__ == "__main__":
    main()
