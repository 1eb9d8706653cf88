"""The steps of `make gpu`, in order: those that say most come first, because the time for all is limited."""

from __future__ import annotations

import json
import os
import xml.etree.ElementTree as ET
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from .checkout import ROOT
from .models import SHARE_OF_MEMORY, cached_models
from .running import Step, StepFailedError

TOTAL_S = {"one": 480.0, "training": 480.0, "multi": 480.0, "vllm": 1800.0}
"""Most seconds for all steps of a part."""
_COMMAND = ("-c", "from weightlane.cli.main import main; main()")
_ROOM_FOR_8_GB = 64 * 10**9
"""Live parameters, what they are copied to for the limits, a snapshot and two staged versions, all on one GPU."""
_SUITE_OF_ITS_OWN = "not whole_conformance_suite"
"""The conformance suite has a step of its own."""


def steps(facts: Mapping[str, Any], ini: Path) -> list[Step]:
    """The steps of all parts, given `facts` of `probe.look`, and a configuration file of pytest's in place of the project's."""
    devices = facts["devices"]
    return [*_on_one(devices, ini), *_of_training(), *_on_several(len(devices), ini), *_with_vllm(devices)]


def _on_one(devices: Sequence[Mapping[str, Any]], ini: Path) -> list[Step]:
    large = _memory_bytes(devices) > _ROOM_FOR_8_GB
    model, size = ("qwen3-4b", "8 GB") if large else ("qwen3-1.7b", "3.4 GB")
    tests = _pytest(ini, *_gpu_tests())
    small, engines = "--model qwen3-0.6b --rounds 2", "--engine cuda_ipc --engine shm --engine gloo"
    return [
        Step("tests", "one", "tests that need one GPU", tests, counted, 120, "python -m pytest -m gpu"),
        _suite("cuda_ipc", "one", "`cuda_ipc` between processes keeps every promise of an engine", 150, "conformance"),
        _program("sanitizer", "torch's CUDA stream sanitizer finds no race in two processes that sync"),
        _program("kernels", "delta and fp8: speed, and the CPU's result bit for bit"),
        _program("snapshot", "a training step next to a snapshot"),
        _bench("bench-1gb", "a sync of 1.2 GB, with loops", f"{engines} --integrity off {small} --loops", 120),
        _bench("bench-delta", "the same of which 1 % has changed", f"--engine cuda_ipc --codec delta {small}", 60),
        _bench(
            "bench-large", f"a sync of {size}", f"--engine cuda_ipc --integrity off --model {model} --rounds 1", 150
        ),
    ]


def _of_training() -> list[Step]:
    suites = [
        Step(
            f"{engine}-conformance{'-on-one' if ranks > 1 else ''}",
            "training",
            f"`{engine}` keeps every promise of a training engine, {'two ranks' if ranks > 1 else 'one rank'} on one GPU",
            ("-m", "benchmarks.gpu.one_gpu", engine, "--ranks", str(ranks), "--junit", "{out}"),
            counted,
            180,
            needs=_packages("transformers", "safetensors", *packages),
        )
        for ranks in (1, 2)
        for engine, packages in (("fsdp2", ()), ("megatron", ("megatron",)))
    ]
    about = "log-probabilities of 8,192 targets, forward and backward, with top-k and next to others' kernels that are installed"
    command = ("-m", "benchmarks.training.engines", "--parts", "cuda-head", "--json", "{out}")
    heads = Step("heads", "training", about, command, _heads, 120, needs=_packages("transformers", "triton"))
    return [*suites, heads]


def _on_several(count: int, ini: Path) -> list[Step]:
    def two(facts: Mapping[str, Any]) -> str:
        return "" if len(facts["devices"]) > 1 else "it takes two GPUs or more"

    def one_only(facts: Mapping[str, Any]) -> str:
        return "with several GPUs the next step shows more" if not two(facts) else ""

    devices = max(2, min(count, 4))
    file = "tests/ckpt_engines/engines/torch_distributed/test_nccl.py"
    on_one = ("-m", "benchmarks.gpu.one_gpu", "nccl", "--junit", "{out}")
    shared = "`nccl` between processes that share a GPU, as ranks of several machines do"
    senders = "several senders (four GPUs), groups next to a training's own"
    options = f"--engine nccl --engine cuda_ipc --integrity off --model qwen3-0.6b --rounds 2 --devices {devices}"
    bench = _bench("nccl-bench", "a sync of 1.2 GB from GPU to GPU", options, 150, devices - 1)
    return [
        Step("nccl-conformance-on-one", "multi", shared, on_one, counted, 300, needs=one_only),
        _suite("nccl", "multi", "`nccl` keeps every promise of an engine", 180, "nccl-conformance", two),
        Step("nccl-tests", "multi", senders, _pytest(ini, file), counted, 120, f"python -m pytest -m gpu {file}", two),
        replace(bench, part="multi", needs=two),
    ]


def _memory_bytes(devices: Sequence[Mapping[str, Any]]) -> int:
    """Memory of the device that has least; 0 without devices."""
    return min((int(device["memory_bytes"]) for device in devices), default=0)


def _with_vllm(devices: Sequence[Mapping[str, Any]]) -> list[Step]:
    def needs(ranks: int) -> Any:
        def missing(facts: Mapping[str, Any]) -> str:
            if absent := _packages("vllm", "safetensors", "transformers")(facts):
                return absent
            if len(facts["devices"]) < ranks:
                return f"it takes {ranks} GPUs"
            size = f"{largest_bytes / 1e9:.1f} GB"
            return "" if models else f"the Hugging Face cache (HF_HOME) has no causal language model of at most {size}"

        return missing

    hub = Path(os.environ.get("HF_HOME", "~/.cache/huggingface")).expanduser() / "hub"
    largest_bytes = SHARE_OF_MEMORY * _memory_bytes(devices)
    models = cached_models(hub, largest_bytes)
    paths, names = [str(path) for path in models.values()], " ".join(models) or "MODEL"
    return [
        Step(
            f"vllm-tp{ranks}-{engine}",
            "vllm",
            f"versions into vLLM with CUDA graphs, TP{ranks}, over `{engine}`",
            ("-m", "benchmarks.gpu.vllm_replica", "--json", "{out}", "--tp", str(ranks), "--engine", engine, *paths),
            _as_they_are,
            600,
            f"python -m benchmarks.gpu.vllm_replica --tp {ranks} --engine {engine} {names}",
            needs(ranks),
        )
        for ranks, engine in ((1, "cuda_ipc"), (1, "shm"), (2, "shm"))
    ]


def _suite(engine: str, part: str, about: str, limit_s: float, name: str, needs: Any = lambda _: "") -> Step:
    command = (*_COMMAND, "conformance", engine, "--out", "{out}")
    return Step(name, part, about, command, counted, limit_s, f"weightlane conformance {engine}", needs)


def _program(name: str, about: str) -> Step:
    return Step(name, "one", about, ("-m", f"benchmarks.gpu.{name}", "--json", "{out}"), _as_they_are, 60)


def _packages(*names: str) -> Callable[[Mapping[str, Any]], str]:
    def missing(facts: Mapping[str, Any]) -> str:
        absent = [name for name in names if name not in facts["optional"]]
        return f"not installed: {', '.join(absent)}" if absent else ""

    return missing


def _bench(name: str, about: str, options: str, limit_s: float, receivers: int = 1) -> Step:
    shown = f"bench --device cuda {options} --receivers {receivers}"
    command = (*_COMMAND, *shown.split(), "--deadline-s", "90", "--out", "{out}")
    return Step(name, "one", about, command, benched, limit_s, f"weightlane {shown}")


def _gpu_tests() -> list[str]:
    """The files with tests that are marked ``gpu``, except those that are about several."""
    files = (path.relative_to(ROOT) for path in sorted((ROOT / "tests").rglob("test_*.py")))
    return [
        str(path)
        for path in files
        if "mark.gpu" in (ROOT / path).read_text(encoding="utf-8") and "nccl" not in path.name
    ]


def _pytest(ini: Path, *files: str) -> tuple[str, ...]:
    options = ("-c", str(ini), "--rootdir", str(ROOT), "--import-mode=importlib", "-p", "no:cacheprovider", "-q")
    return ("-m", "pytest", *options, "-m", "gpu", "-k", _SUITE_OF_ITS_OWN, "--junitxml={out}", *files)


def counted(junit: Path) -> dict[str, Any]:
    """How many tests of a JUnit report passed, failed and were skipped. Raises `StepFailedError` when none ran."""
    suites = list(ET.parse(junit).getroot().iter("testsuite"))  # noqa: S314 - pytest has written it
    total, failures, errors, skipped = (
        sum(int(suite.get(key, 0)) for suite in suites) for key in ("tests", "failures", "errors", "skipped")
    )
    figures = {"passed": total - failures - errors - skipped, "failed": failures + errors, "skipped": skipped}
    if total == skipped:
        raise StepFailedError(f"no test has run, {skipped} were skipped", figures)
    return figures


def benched(file: Path) -> dict[str, Any]:
    """The rows of `weightlane bench`: milliseconds, and GB/s from publication to the last commit.

    Raises `StepFailedError` when an engine was not measured, or carried wrong bits.
    """
    report = json.loads(file.read_text(encoding="utf-8"))
    figures: dict[str, Any] = {"a synchronous update, ms": 1e3 * report["blocking"]["latency_s"]["median"]}
    why = [f"{engine} was not measured: {reason}" for engine, reason in report["unavailable"].items()]
    for row in report["rows"]:
        figures.setdefault("copy on the device, GB/s", _rate(row, report["limits"]["memcpy_s"]))
        name = f"{row['engine']} {row['codec']}"
        figures[f"{name}: trainer blocked, ms"] = 1e3 * row["trainer_blocked_s"]["median"]
        figures[f"{name}: rollout blocked, ms"] = 1e3 * row["rollout_blocked_s"]["median"]
        figures[f"{name}: latency, ms"] = 1e3 * row["latency_s"]["median"]
        figures[f"{name}: GB/s"] = _rate(row, row["latency_s"])
        if row["slowdown"]:
            figures[f"{name}: training and decode keep"] = "{trainer:.2f}, {decode:.2f}".format(**row["slowdown"])
        if not row["verified"]:
            why.append(f"{name}: what arrived is not what was sent")
    if why:
        raise StepFailedError("; ".join(why), figures)
    return figures


def _rate(row: Mapping[str, Any], seconds: Mapping[str, float]) -> float:
    return float(row["payload_bytes"]) / seconds["median"] / 1e9


def _heads(file: Path) -> dict[str, Any]:
    figures: dict[str, Any] = {}
    for row in json.loads(file.read_text(encoding="utf-8"))["rows"]:
        figures |= {f"{row['method']}: ms": 1e3 * row["seconds"], f"{row['method']}: MB": row["bytes"] / 1e6}
    return figures


def _as_they_are(file: Path) -> dict[str, Any]:
    return dict(json.loads(file.read_text(encoding="utf-8"))["figures"])
