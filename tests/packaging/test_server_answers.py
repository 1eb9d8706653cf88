"""Errors of a vLLM server reach its clients unchanged."""

from __future__ import annotations

import ast
import importlib.util
from collections.abc import Iterator
from pathlib import Path

import pytest
from syntax_trees import nodes_of

ROOT = Path(__file__).parents[2]
IN_VLLM = ("ckpt_engines", "sync", "rollout", "plugins")
"""Folders whose modules run in a vLLM server, too."""


def texts(path: Path) -> Iterator[str]:
    """Every text of a module but its docstrings. Values in f-strings become a word."""
    docstrings = {id(each.value) for each in nodes_of(path) if isinstance(each, ast.Expr)}
    for each in nodes_of(path):
        parts = each.values if isinstance(each, ast.JoinedStr) else [each]
        if id(each) not in docstrings and isinstance(each, ast.Constant | ast.JoinedStr):
            yield "".join(str(part.value) if isinstance(part, ast.Constant) else "value" for part in parts)


def test_no_text_of_a_vllm_server_has_a_path_which_vllm_would_cut_out_of_its_answers() -> None:
    vllm = importlib.util.find_spec("vllm")
    if vllm is None or not vllm.submodule_search_locations:
        pytest.skip("vLLM is not installed")
    file = Path(vllm.submodule_search_locations[0]) / "entrypoints/serve/exception_handling/utils.py"
    spec = importlib.util.spec_from_file_location("vllm_answers", file)  # vLLM itself takes long to import
    assert spec is not None
    assert spec.loader is not None
    answers = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(answers)
    modules = [
        path
        for folder in IN_VLLM
        for path in (ROOT / folder).rglob("*.py")
        if not {"tests", "integration"} & {*path.parts}
    ]
    assert len(modules) > 100
    said = {text for path in modules for text in texts(path)}
    cut = {text for text in said if answers.sanitize_message(text) != text.strip()}
    assert cut == {"docs/guides/conformance.md", "docs/guides/writing-a-rollout-engine.md"}, (
        "which the conformance suite says, in no server"
    )
