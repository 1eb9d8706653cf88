"""In every architecture, versions that are committed by copies are bit for bit those that vLLM's own loading makes."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tiny_models import make_architecture

pytestmark = [pytest.mark.vllm, pytest.mark.slow]

PROGRAM = str(Path(__file__).with_name("layout_process.py"))
ENVIRONMENT = {
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "OMP_NUM_THREADS": "1",
}


class Process:
    """`layout_process.py`, called by method name."""

    def __init__(self, children: Any) -> None:
        self._child = children.start([PROGRAM], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=ENVIRONMENT)

    def call(self, method: str, *arguments: Any) -> Any:
        self._child.stdin.write(json.dumps([method, *map(str, arguments[:2]), *arguments[2:]]) + "\n")
        self._child.stdin.flush()
        for line in self._child.stdout:
            if line.startswith("SAY"):
                return json.loads(line.removeprefix("SAY"))
        raise AssertionError(f"the process ended with {self._child.wait(30.0)}")


@pytest.fixture(scope="module")
def process(session_children: Any) -> Iterator[Process]:
    started = Process(session_children)
    yield started
    started._child.kill()


@pytest.mark.parametrize("kind", ["qwen3-tied", "qwen3", "llama", "gpt2", "bloom", "gemma2", "phi3"])
def test_copies_leave_what_reloading_leaves_and_numbered_elements_arrive_where_the_layout_says(
    kind: str, process: Process, tmp_path: Path
) -> None:
    answer = process.call("compare", make_architecture(kind, tmp_path), "float32")
    assert answer["ways"] == ["traced", "traced"], answer["summary"]
    assert answer["slices"] > 10
    assert answer["after_first"] == answer["after_second"] == answer["sparse"] == answer["oracle"] == []


def test_what_is_computed_while_loading_is_refused_by_name_and_right_nevertheless(
    process: Process, tmp_path: Path
) -> None:
    answer = process.call("compare", make_architecture("mamba2", tmp_path), "float32")
    assert answer["ways"] == ["mixed", "mixed"]
    assert answer["reloaded"] == ["backbone.layers.0.mixer", "backbone.layers.1.mixer"]
    assert "backbone.layers.0.mixer.A: loading reads it back (exp)" in answer["summary"]
    assert answer["slices"] > 10
    assert answer["after_first"] == answer["after_second"] == answer["sparse"] == answer["oracle"] == []


def test_parameters_that_move_and_other_types_are_learned_anew(process: Process, tmp_path: Path) -> None:
    answer = process.call("moved", make_architecture("qwen3-tied", tmp_path), "bfloat16")
    assert answer == {
        "traced_again": True,
        "differing": [],
        "kept": True,
        "ways": ["traced"],
        "sent": ["torch.float32"],
        "cast": [],
    }


def test_a_layer_that_computes_from_a_hidden_copy_is_found_out_by_what_it_computes(
    process: Process, tmp_path: Path
) -> None:
    answer = process.call("stale", make_architecture("llama", tmp_path), "float32")
    assert answer["way"] == "reload"
    assert f"{answer['layer']} does not compute from its parameters alone" in answer["why"]
