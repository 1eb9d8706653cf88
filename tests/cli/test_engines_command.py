"""``weightlane engines`` beside engines of others, whose modules may do anything when they are imported."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from installed import install
from waiting import HANG_S

LIMIT_S = 1.0
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
COMMANDS = (
    ("engines", "--json"),
    ("engines",),
    ("engines", "--markdown", "--of", "loud_engines"),
    ("conformance", "colours"),
    ("conformance", "exits"),
)
PROGRAM = f"""
import sys
import loud_dawdles  # so that only its availability check is waited for
from weightlane.ckpt_engines import registry
from weightlane.cli.main import main

Registry = registry.CheckpointEngineRegistry
listing, rows = Registry._listing, {{}}

def listed_once(self, name):
    registry.LISTING_LIMIT_S = {LIMIT_S} if name in {SLOW} else {HANG_S}
    return rows.get(name) or rows.setdefault(name, listing(self, name))

Registry._listing = listed_once
for arguments in {COMMANDS}:
    sys.argv = ["weightlane", *arguments]
    try:
        main()
    except SystemExit as ended:
        for stream in (sys.stdout, sys.stderr):
            print("ended with", ended.code or 0, file=stream, flush=True)
"""


def test_a_module_that_exits_raises_hangs_or_prints_costs_its_own_row_only_and_is_shown_as_it_is(
    tmp_path: Path, children: Any
) -> None:
    entries = "\n".join(f"{name} = loud_{name}:Engine" for name in MODULES)
    install(tmp_path, "loud_engines", "", entries, group="weightlane.ckpt_engines")
    install(tmp_path, "loud_trainers", "", "exits = loud_exits:Engine", group="weightlane.training_engines")
    for name, module in MODULES.items():
        (tmp_path / f"loud_{name}.py").write_text(module)
    status, out, err = children.run(["-c", PROGRAM], env={"PYTHONPATH": str(tmp_path), "COLUMNS": "400"})
    assert status == 0, err
    plain, table, reference, *of_errors = re.split(r"ended with \d\n", out)
    assert re.findall(r"ended with (\d)", out) == ["0", "0", "0", "2", "2"]

    kinds = json.loads(plain)
    assert [(row["name"], row["unavailable"]) for row in kinds["rollout"]] == [("vllm", None)]
    trainers = {row["name"]: row["unavailable"] for row in kinds["training"]}
    assert (trainers["fsdp2"], trainers["megatron"]) == (None, None)
    assert "SystemExit: no licence" in trainers["exits"]
    rows = {row["name"]: row for row in kinds["checkpoint"]}
    built_in = [name for name, row in rows.items() if row["distribution"].startswith("weightlane ")]
    assert built_in == ["cuda_ipc", "filesystem", "gloo", "hccl", "nccl", "shm"]
    assert rows["filesystem"]["capabilities"]["delivery"] == ["store"]
    assert rows["hccl"]["unavailable"] == "torch_npu is not installed"
    assert [name for name, said in REASONS.items() if said not in rows[name]["unavailable"]] == []
    assert (rows["prints"]["unavailable"], rows["shm"]["unavailable"]) == (None, None)
    assert [name for name in rows if name not in table] == []
    assert "no: torch_npu is not installed" in table
    assert [name for name, said in REASONS.items() if said not in table] == []
    cannot_be_loaded = REASONS.keys() - {"dawdles"}
    assert [name for name in cannot_be_loaded if REASONS[name] not in reference] == []
    assert "An engine of another distribution." in reference
    assert "".join(of_errors) == "", "an error is told on stderr alone"

    while_listing, _, _, colours, exits, _ = re.split(r"ended with \d\n", err)
    assert "hello" in while_listing
    assert "hello from a library" in while_listing
    assert REASONS["colours"] in colours
    assert REASONS["exits"] in exits
    assert "Traceback" not in colours + exits
