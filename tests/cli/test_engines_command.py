"""``weightlane engines`` beside engines of others, whose modules may do anything when they are imported."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from command_line import MAIN
from waiting import HANG_S

LIMIT_S = 4.0
"""How long the engines of `SLOW` are waited for; every other one gets as long as a busy machine may take."""
SLOW = ("hangs", "dawdles")
GOOD = """
from weightlane.ckpt_engines import API_VERSION, Capabilities, CheckpointEngine, Delivery

class Engine(CheckpointEngine):
    "An engine of another distribution."
    api_version = API_VERSION
    capabilities = Capabilities(devices={"cpu"}, delivery={Delivery.STORE})
    def make_sender(self, name): raise NotImplementedError
    def make_receiver(self, name): raise NotImplementedError
"""
MODULES = {
    "exits": "raise SystemExit('no licence')",
    "interrupts": "raise KeyboardInterrupt",
    "invents": "class Odd(BaseException): pass\nraise Odd('of its own kind')",
    "hangs": "import time\ntime.sleep(1e6)",
    "dawdles": f"import time\n{GOOD}\n    @classmethod\n    def unavailable_reason(cls): time.sleep(1e6)\n",
    "colours": "raise RuntimeError('[red]not found[/red] :X: [/tmp/x] [/')",
    "prints": f"import os\nprint('hello')\nos.write(1, b'hello from a library')\n{GOOD}",
}
REASONS = {
    "exits": "could not be imported from loud_exits:Engine: SystemExit: no licence.",
    "interrupts": "its module raised KeyboardInterrupt",
    "invents": "Odd: of its own kind",
    "hangs": f"the import of its module had not ended after {LIMIT_S:g} s",
    "dawdles": f"its availability check had not ended after {LIMIT_S:g} s",
    "colours": "[red]not found[/red] :X: [/tmp/x] [/",
}
PROGRAM = f"""
import loud_dawdles  # so that only its availability check is waited for
from weightlane.ckpt_engines import registry

listing = registry.CheckpointEngineRegistry._listing

def limited(self, name):
    registry.LISTING_LIMIT_S = {LIMIT_S} if name in {SLOW} else {HANG_S}
    return listing(self, name)

registry.CheckpointEngineRegistry._listing = limited
{MAIN}
"""


@pytest.fixture(scope="module")
def weightlane(tmp_path_factory: pytest.TempPathFactory, session_children: Any) -> Callable[..., tuple[int, str, str]]:
    """Runs the command where a distribution of such engines is installed: status, standard output, standard error."""
    site = tmp_path_factory.mktemp("site")
    info = site / "loud_engines-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: loud-engines\nVersion: 1.0\n")
    entries = [f"{name} = loud_{name}:Engine" for name in MODULES]
    (info / "entry_points.txt").write_text("\n".join(["[weightlane.ckpt_engines]", *entries]))
    for name, module in MODULES.items():
        (site / f"loud_{name}.py").write_text(module)

    def run(*arguments: str) -> tuple[int, str, str]:
        environment = {"PYTHONPATH": str(site), "COLUMNS": "400"}
        status, out, err = session_children.run(["-c", PROGRAM, *arguments], HANG_S, env=environment)
        return status, out, err

    return run


def test_a_module_that_exits_raises_hangs_or_prints_costs_its_own_row_only(weightlane: Any) -> None:
    status, out, err = weightlane("engines", "--json")
    assert status == 0, err
    rows = {row["name"]: row for row in json.loads(out)}
    assert {"gloo", "shm", *MODULES} <= set(rows)
    assert [name for name, said in REASONS.items() if said not in rows[name]["unavailable"]] == []
    assert (rows["prints"]["unavailable"], rows["shm"]["unavailable"]) == (None, None)
    assert "hello" in err
    assert "hello from a library" in err


def test_the_table_and_the_reference_show_reasons_as_they_are(weightlane: Any) -> None:
    _, table, _ = weightlane("engines")
    assert [name for name, said in REASONS.items() if said not in table] == []
    _, reference, _ = weightlane("engines", "--markdown", "--of", "loud-engines")
    cannot_be_loaded = REASONS.keys() - {"dawdles"}
    assert [name for name in cannot_be_loaded if REASONS[name] not in reference] == []
    assert "An engine of another distribution." in reference
    assert "hello" not in table + reference


def test_an_error_is_shown_as_it_is(weightlane: Any) -> None:
    status, out, err = weightlane("conformance", "colours")
    assert (status, out) == (2, "")
    assert REASONS["colours"] in err
    assert "Traceback" not in err
    status, _, err = weightlane("conformance", "exits")
    assert (status, REASONS["exits"] in err) == (2, True)


def test_every_console_of_the_command_is_made_where_pictures_are_switched_off() -> None:
    folder = Path(__file__).parents[2] / "cli"
    makers = [path.name for path in folder.glob("*.py") if "Console(" in path.read_text()]
    assert makers == ["output.py"]
