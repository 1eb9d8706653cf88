"""A device is said, never guessed: nothing that moves bytes relies on the device that is current in its thread.

That is number 0 in a new thread, whatever the thread that started it had. So streams, events and whatever else acts on the
current device are made by `weightlane.ckpt_engines.runtime.devices` alone, and an accelerator is named with its index.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest
from syntax_trees import tree_of

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("ckpt_engines", "sync", "plugins/packages")
TYPES = {"cuda", "npu", "xpu"}
"""Types of devices. A type that is used as a device means whichever device of that type is current."""
ABOUT_A_TYPE = {"Capabilities", "is_available", "device_count"}
"""Calls that are told a type of devices, and mean no device."""
CURRENT = {"current_device", "set_device"}
ALLOWED = {
    "ckpt_engines/engines/torch_distributed/process_group.py": "asks for NCCL's version, which is that of no device",
}
"""Files that act on a current device, or on torch's module for a type of devices, and why they may."""


def offences(tree: ast.Module) -> list[str]:
    """List the lines of a module that act on the current device, or could, as ``line: what``."""
    skipped = {id(node) for harmless in _about_types(tree) for node in ast.walk(harmless)}
    found = []
    for node in ast.walk(tree):
        if id(node) in skipped:
            continue
        if isinstance(node, ast.Attribute) and ast.unparse(node) in {f"torch.{kind}" for kind in TYPES}:
            found.append((node.lineno, ast.unparse(node)))
        elif isinstance(node, ast.Call) and (called := _name(node.func)) in CURRENT:
            found.append((node.lineno, f"{called}()"))
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in TYPES:
            found.append((node.lineno, f".{node.func.attr}()"))
        elif isinstance(node, ast.Constant) and node.value in TYPES:
            found.append((node.lineno, repr(node.value)))
    return [f"{line}: {what}" for line, what in sorted(found)]


def _name(function: ast.expr) -> str:
    return function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")


def _about_types(tree: ast.Module) -> Iterator[ast.AST]:
    """Where a string means a type of devices: declarations, questions, comparisons, and the keys of tables."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and _name(node.func) in ABOUT_A_TYPE:
            yield from (*node.args, *(keyword.value for keyword in node.keywords))
        elif isinstance(node, ast.Compare):
            yield from (each for each in (node.left, *node.comparators) if isinstance(each, ast.Constant))
        elif isinstance(node, ast.Dict):
            yield from (key for key in node.keys if key is not None)


def test_nothing_that_moves_bytes_relies_on_a_current_device() -> None:
    found = {}
    for folder in FOLDERS:
        for path in sorted((ROOT / folder).rglob("*.py")):
            if {"build", "integration", "tests"} & set(path.relative_to(ROOT).parts):
                continue
            if bad := offences(tree_of(path)):
                found[str(path.relative_to(ROOT))] = bad
    assert {path: bad for path, bad in found.items() if path not in ALLOWED} == {}
    assert sorted(set(ALLOWED) - set(found)) == [], "no longer needed in the list of what is allowed"


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("torch.cuda.current_device()", ["1: current_device()", "1: torch.cuda"]),
        ("set_device(0)", ["1: set_device()"]),
        ("from torch import npu\nx = torch.npu.Stream()", ["2: torch.npu"]),
        ("torch.device('cuda')", ["1: 'cuda'"]),
        ("torch.empty(5, device='npu')", ["1: 'npu'"]),
        ("def f(device='cuda'): pass", ["1: 'cuda'"]),
        ("memory.to('cuda', non_blocking=True)", ["1: 'cuda'"]),
        ("memory.cuda()", ["1: .cuda()"]),
        ("torch.device('cuda:3')", []),
        ("device.type == 'cuda'", []),
        ("Capabilities(devices=frozenset({'cuda'}))", []),
        ("is_available('npu')", []),
        ("BACKENDS = {'cuda': 'nccl'}", []),
        ("'torch.cuda is no place for this'", []),
    ],
)
def test_the_search_finds_what_it_is_for(source: str, found: list[str]) -> None:
    assert offences(ast.parse(source)) == found
