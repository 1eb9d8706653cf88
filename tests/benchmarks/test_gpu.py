"""`make gpu` as far as it needs no GPU: what it runs, how steps end, what it says of what is missing, and its report."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from waiting import HANG_S

ROOT = Path(__file__).resolve().parents[2]
FACTS: Mapping[str, Any] = {
    "torch": "2.11.0+cu130", "cuda": "13.0", "devices": [{"name": "H1", "memory_bytes": 1}], "missing": {}, "driver": "580.1",
    "optional": [], "nccl": "2.28.3", "python": "3.12.1", "system": "Linux x86_64",
}  # fmt: skip


def step(gpu: ModuleType, name: str, program: str, **more: Any) -> Any:
    """A step that runs some Python."""
    values = {"part": "one", "about": "something", "figures": lambda _: {}, "limit_s": 60.0} | more
    return gpu.running.Step(name=name, command=("-c", program, "{out}"), **values)


def run(gpu: ModuleType, one: Any, folder: Path, left_s: float = 60.0, facts: Mapping[str, Any] = FACTS) -> Any:
    return gpu.running.run_step(one, facts, folder, left_s, dict(os.environ))


def test_what_is_missing_is_said_with_what_to_do(gpu: ModuleType) -> None:
    cases: list[tuple[dict[str, Any], str]] = [
        ({"torch": "", "torch_missing": "ModuleNotFoundError: No module named 'torch'"}, "make gpu PYTHON="),
        ({"torch": "2.5.1"}, "2.9 or newer"),
        ({"cuda": ""}, "without CUDA"),
        ({"devices": []}, "nvidia-smi"),
        ({"missing": {"pydantic": "ModuleNotFoundError", "xxhash": "no"}}, "-m pip install pydantic xxhash"),
    ]
    assert gpu.checkout.what_is_missing(FACTS) == []
    for changed, words in cases:
        assert words in "\n".join(gpu.checkout.what_is_missing({**FACTS, **changed}))
    facts = gpu.probe.look()
    assert (facts["missing"], bool(facts["torch"])) == ({}, True)


@pytest.mark.exhaustive
def test_the_checkout_runs_without_being_installed(gpu: ModuleType, tmp_path: Path) -> None:
    """With its engines, its suites and its command, beside packages of which none is weightlane."""
    gpu.checkout.make_importable(tmp_path / "path")
    program = (
        "import sys; from importlib.metadata import entry_points, version; import weightlane.cli.bench\n"
        "from weightlane.ckpt_engines import CheckpointEngineRegistry as R\n"
        "assert all('editable' not in str(finder) for finder in sys.meta_path)\n"
        "suites = entry_points(group='weightlane.conformance').names\n"
        "print(version('weightlane'), R().engine_class('shm').__name__, {'nccl', 'hccl'} < suites)"
    )
    path = os.pathsep.join([str(tmp_path / "path"), sysconfig.get_path("purelib")])
    command = [sys.executable, "-S", "-c", program]  # without what pip's editable install puts into every process
    done = subprocess.run(
        command, env={**os.environ, "PYTHONPATH": path}, cwd=tmp_path, capture_output=True, text=True, check=False
    )
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert done.stdout.split() == [version, "ShmEngine", "True"], done.stderr


def test_a_step_has_its_figures_or_says_why_it_failed_without_paths_of_the_machine(
    gpu: ModuleType, tmp_path: Path
) -> None:
    program = "import sys; open(sys.argv[1], 'w').write('7')"
    passed = run(gpu, step(gpu, "writes", program, figures=lambda path: {"GB/s": int(path.read_text())}), tmp_path)
    assert (passed.outcome, passed.figures, passed.why) == ("passed", {"GB/s": 7}, "")
    failed = run(gpu, step(gpu, "fails", "raise OSError('no /home/somebody/model.bin here')"), tmp_path)
    assert (failed.outcome, failed.why) == ("failed", "OSError: no model.bin here")
    unread = run(gpu, step(gpu, "odd", program, figures=lambda path: json.loads(path.read_text())["x"]), tmp_path)
    assert unread.outcome == "failed"
    assert "findings" in unread.why


def test_a_step_for_which_something_is_missing_or_no_time_is_left_is_not_run(gpu: ModuleType, tmp_path: Path) -> None:
    needy = run(gpu, step(gpu, "needy", "1/0", needs=lambda facts: f"it has {len(facts['devices'])}"), tmp_path)
    assert (needy.outcome, needy.why) == ("not run", "it has 1")
    late = run(gpu, step(gpu, "late", "1/0"), tmp_path, left_s=1.0)
    assert (late.outcome, late.seconds) == ("not run", 0.0)


def test_the_report_has_the_date_the_machine_and_each_figure_with_its_command(gpu: ModuleType) -> None:
    figures = {"GB/s": 12.345, "n": 3}
    result = gpu.running.Result("one", "one", "what | it shows", "python -m x", "passed", 3.0, figures=figures)
    report = json.loads(json.dumps(gpu.report.report_of(FACTS, "2026-11-25", ["one"], [result])))
    assert (report["passed"], report["date"], report["machine"]["driver"]) == (True, "2026-11-25", "580.1")
    assert report["steps"][0]["figures"] == figures
    assert "| what / it shows | `python -m x` | passed | 3 | GB/s 12.3; n 3 |" in gpu.report.markdown(report)


def test_a_failure_hides_no_other_step(gpu: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    planned = [step(gpu, "bad", "raise SystemExit(3)"), step(gpu, "good", ""), step(gpu, "other", "", part="multi")]
    monkeypatch.setattr(gpu.__main__, "steps", lambda *_: planned)
    monkeypatch.setattr(gpu.__main__, "probe", lambda _: dict(FACTS))
    assert gpu.__main__.main(["--out", str(tmp_path)]) == 1
    found = json.loads((tmp_path / "gpu.json").read_text())
    assert [(one["name"], one["outcome"]) for one in found["steps"]] == [("bad", "failed"), ("good", "passed")]
    assert gpu.__main__.main(["--out", str(tmp_path), "--only", "good", "--parts", "one,multi"]) == 0
    assert gpu.__main__.main(["--out", str(tmp_path), "--only", "none"]) == 2
    with pytest.raises(SystemExit):
        gpu.__main__.main(["--parts", "two"])


def test_figures_are_taken_from_the_files_of_tests_and_of_the_benchmark(gpu: ModuleType, tmp_path: Path) -> None:
    junit = tmp_path / "junit.xml"
    junit.write_text('<testsuites><testsuite tests="9" failures="1" errors="1" skipped="2"/></testsuites>')
    assert gpu.steps.counted(junit) == {"passed": 5, "failed": 2, "skipped": 2}
    junit.write_text('<testsuites><testsuite tests="2" failures="0" errors="0" skipped="2"/></testsuites>')
    with pytest.raises(gpu.running.StepFailedError, match="no test has run"):
        gpu.steps.counted(junit)

    (kept,) = (ROOT / "benchmarks/results").glob("*/bench-qwen3-0.6b-shm-full-*.json")
    bench = json.loads(kept.read_text())
    name = "{engine} {codec}".format(**bench["rows"][0])
    bench["rows"][0]["verified"], bench["unavailable"] = False, {"nccl": "no second GPU"}
    (tmp_path / "bench.json").write_text(json.dumps(bench))
    program = f"import shutil, sys; shutil.copy({str(tmp_path / 'bench.json')!r}, sys.argv[1])"
    failed = run(gpu, step(gpu, "bench", program, figures=gpu.steps.benched), tmp_path)
    assert failed.outcome == "failed"
    assert failed.figures[f"{name}: latency, ms"] > 0
    assert failed.why == f"nccl was not measured: no second GPU; {name}: what arrived is not what was sent"


@pytest.mark.exhaustive
@pytest.mark.parametrize("program", ["kernels", "snapshot", "sanitizer"])
def test_the_programs_run_on_a_cpu_too(
    gpu: ModuleType, program: str, tmp_path: Path, children: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = {"kernels": ["--mib", "2"], "snapshot": ["--mib", "8", "--step-ms", "2"], "sanitizer": []}[program]
    deadline = [] if program == "kernels" else ["--deadline-s", str(HANG_S)]
    out = tmp_path / "out.json"
    monkeypatch.chdir(ROOT)
    command = ["-m", f"benchmarks.gpu.{program}", "--device", "cpu", "--json", str(out), *sizes, *deadline]
    status, _, errors = children.run(command)
    assert status == 0, errors
    figures = gpu.steps._as_they_are(out)
    assert figures


def test_bits_that_a_device_gets_wrong_are_noticed(gpu: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    from weightlane.ckpt_engines.runtime.devices import HOST, runtime_of

    kernels = gpu.kernels
    real: Callable[..., Any] = kernels.decode

    def other(*arguments: Any, **more: Any) -> Any:
        patch = real(*arguments, **more)
        patch.flips[0] ^= 2
        return patch

    monkeypatch.setattr(kernels, "decode", other)
    with pytest.raises(AssertionError, match="new weights"):
        kernels.delta(runtime_of(HOST), 2)
