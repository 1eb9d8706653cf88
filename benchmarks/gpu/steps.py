"""The steps of `make gpu`, in order: those that say most come first, because the time for all is limited."""

from __future__ import annotations

import json
import os
import xml.etree.ElementTree as ET
from collections.abc import Mapping, Sequence
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
    """The steps of all parts.

    Args:
        facts: As `probe.look` gives them.
        ini: A configuration file of pytest's, which takes the place of the project's: that one names plugins.
    """
    devices = facts["devices"]
    return [*_on_one(devices, ini), *_of_training(), *_on_several(len(devices), ini), *_with_vllm(devices)]


def _on_one(devices: Sequence[Mapping[str, Any]], ini: Path) -> list[Step]:
    large = _memory_bytes(devices) > _ROOM_FOR_8_GB
    model, size = ("qwen3-4b", "8 GB") if large else ("qwen3-1.7b", "3.4 GB")
    return [
        Step(
            "tests",
            "one",
            "tests that need one GPU",
            _pytest(ini, *_gpu_tests()),
            counted,
            120,
            "python -m pytest -m gpu",
        ),
        Step(
            "conformance",
            "one",
            "`cuda_ipc` between processes keeps every promise of an engine",
            (*_COMMAND, "conformance", "cuda_ipc", "--out", "{out}"),
            counted,
            150,
            "weightlane conformance cuda_ipc",
        ),
        Step(
            "sanitizer",
            "one",
            "torch's CUDA stream sanitizer finds no race in two processes that sync",
            ("-m", "benchmarks.gpu.sanitizer", "--json", "{out}"),
            _as_they_are,
            60,
        ),
        Step(
            "kernels",
            "one",
            "delta and fp8: speed, and the CPU's result bit for bit",
            ("-m", "benchmarks.gpu.kernels", "--json", "{out}"),
            _as_they_are,
            60,
        ),
        Step(
            "snapshot",
            "one",
            "a training step beside a snapshot",
            ("-m", "benchmarks.gpu.snapshot", "--json", "{out}"),
            _as_they_are,
            60,
        ),
        _bench(
            "bench-1gb",
            "a sync of 1.2 GB, and loops beside it",
            "--engine cuda_ipc --engine shm --engine gloo --integrity off --model qwen3-0.6b --rounds 2 --loops --receivers 1",
            120,
        ),
        _bench(
            "bench-delta",
            "the same of which 1 % has changed",
            "--engine cuda_ipc --codec delta --model qwen3-0.6b --rounds 2 --receivers 1",
            60,
        ),
        _bench(
            "bench-large",
            f"a sync of {size}",
            f"--engine cuda_ipc --integrity off --model {model} --rounds 1 --receivers 1",
            150,
        ),
    ]


def _of_training() -> list[Step]:
    def with_package(*names: str) -> Any:
        def missing(facts: Mapping[str, Any]) -> str:
            absent = [name for name in names if name not in facts["optional"]]
            return f"not installed: {', '.join(absent)}" if absent else ""

        return missing

    suites = [
        Step(
            f"{engine}-conformance{'-on-one' if ranks > 1 else ''}",
            "training",
            f"`{engine}` keeps every promise of a training engine, {'two ranks' if ranks > 1 else 'one rank'} on one GPU",
            ("-m", "benchmarks.gpu.one_gpu", engine, "--ranks", str(ranks), "--junit", "{out}"),
            counted,
            180,
            needs=with_package("transformers", "safetensors", *packages),
        )
        for ranks in (1, 2)
        for engine, packages in (("fsdp2", ()), ("megatron", ("megatron",)))
    ]
    return [
        *suites,
        Step(
            "heads",
            "training",
            "log-probabilities of 8,192 targets, forward and backward, beside the kernels of others that are installed",
            ("-m", "benchmarks.training", "--parts", "cuda-head", "--json", "{out}"),
            _heads,
            120,
            needs=with_package("transformers", "triton"),
        ),
    ]


def _on_several(count: int, ini: Path) -> list[Step]:
    def two(facts: Mapping[str, Any]) -> str:
        return "" if len(facts["devices"]) > 1 else "it takes two GPUs or more"

    devices = max(2, min(count, 4))
    return [
        Step(
            "nccl-conformance-on-one",
            "multi",
            "`nccl` between processes that share a GPU, as ranks of several machines do",
            ("-m", "benchmarks.gpu.one_gpu", "nccl", "--junit", "{out}"),
            counted,
            300,
            needs=lambda facts: "with several GPUs the next step shows more" if not two(facts) else "",
        ),
        Step(
            "nccl-conformance",
            "multi",
            "`nccl` keeps every promise of an engine",
            (*_COMMAND, "conformance", "nccl", "--out", "{out}"),
            counted,
            180,
            "weightlane conformance nccl",
            two,
        ),
        Step(
            "nccl-tests",
            "multi",
            "several senders (four GPUs), groups beside a training's own",
            _pytest(ini, "tests/ckpt_engines/engines/torch_distributed/test_nccl.py"),
            counted,
            120,
            "python -m pytest -m gpu tests/ckpt_engines/engines/torch_distributed/test_nccl.py",
            two,
        ),
        replace(
            _bench(
                "nccl-bench",
                "a sync of 1.2 GB from GPU to GPU",
                "--engine nccl --engine cuda_ipc --integrity off --model qwen3-0.6b --rounds 2"
                f" --devices {devices} --receivers {devices - 1}",
                150,
            ),
            part="multi",
            needs=two,
        ),
    ]


def _memory_bytes(devices: Sequence[Mapping[str, Any]]) -> int:
    """Memory of the device that has least; 0 without devices."""
    return min((int(device["memory_bytes"]) for device in devices), default=0)


def _with_vllm(devices: Sequence[Mapping[str, Any]]) -> list[Step]:
    def needs(ranks: int) -> Any:
        def missing(facts: Mapping[str, Any]) -> str:
            absent = [name for name in ("vllm", "safetensors", "aiohttp") if name not in facts["optional"]]
            if absent:
                return f"not installed: {', '.join(absent)}"
            if len(facts["devices"]) < ranks:
                return f"it takes {ranks} GPUs"
            fits = (
                f"the Hugging Face cache (HF_HOME) has no causal language model of at most {largest_bytes / 1e9:.1f} GB"
            )
            return "" if models else fits

        return missing

    hub = Path(os.environ.get("HF_HOME", "~/.cache/huggingface")).expanduser() / "hub"
    largest_bytes = SHARE_OF_MEMORY * _memory_bytes(devices)
    models = cached_models(hub, largest_bytes)
    return [
        Step(
            f"vllm-tp{ranks}-{engine}",
            "vllm",
            f"versions into vLLM with CUDA graphs, TP{ranks}, over `{engine}`",
            (
                "-m",
                "benchmarks.gpu.vllm_server",
                "--json",
                "{out}",
                "--tp",
                str(ranks),
                "--engine",
                engine,
                *(str(path) for path in models.values()),
            ),
            _as_they_are,
            600,
            f"python -m benchmarks.gpu.vllm_server --tp {ranks} --engine {engine} {' '.join(models) or 'MODEL'}",
            needs(ranks),
        )
        for ranks, engine in ((1, "cuda_ipc"), (1, "shm"), (2, "shm"))
    ]


def _bench(name: str, about: str, options: str, limit_s: float) -> Step:
    shown = f"bench --device cuda {options}"
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
    figures: dict[str, Any] = {"the blocking way, ms": 1e3 * report["blocking"]["latency_s"]["median"]}
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
    found = json.loads(file.read_text(encoding="utf-8"))["cuda-head"]
    return {
        f"{way}: {name}": value
        for way, row in found.items()
        for name, value in (("ms", 1e3 * row["seconds"]), ("MB", row["bytes"] / 1e6))
    }


def _as_they_are(file: Path) -> dict[str, Any]:
    return dict(json.loads(file.read_text(encoding="utf-8")))
