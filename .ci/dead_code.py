"""Finds names that the product defines and nothing uses but tests: no product code, benchmark or example, and no documentation.

``make lint`` runs it. A name counts as used wherever it is read, written in a string (processes are called by the names of their
methods) or named in the documentation, whatever it belongs to: so what is found is dead, and not all that is dead is found.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PRODUCT = ("ckpt_engines", "sync", "rollout", "trainer", "cli", "plugins")
USERS = (*PRODUCT, "benchmarks", "examples", "docs", "setup.py", "pyproject.toml", "README.md", "CONTRIBUTING.md")
PLAIN = {
    "property",
    "cached_property",
    "classmethod",
    "staticmethod",
    "abstractmethod",
    "contextmanager",
    "cache",
    "dataclass",
}
"""Decorators that call nothing. Any other may register what it decorates."""
USED_ELSEWHERE = {
    "APPENDS_SYSTEM_PROMPT": "verifiers' Harness",
    "EXECUTES_CODE": "verifiers' Harness",
    "NEEDS_CONTAINER": "verifiers' Harness",
    "SUPPORTS_MCP": "verifiers' Harness",
    "SUPPORTS_RESUME": "verifiers' Harness",
    "_fields_": "ctypes",
    "allow_metadata_only": "a field of the Tinker API",
    "available_bytes": "MicroBatchStats, which programs of one's own read",
    "capture_signals": "uvicorn.Server",
    "close_communicator": "TRL's VLLMClient",
    "commit_gaps_s": "RolloutStats, which programs of one's own read",
    "daemon_threads": "socketserver",
    "do_GET": "http.server",
    "download_model": "vLLM's loader",
    "get_replay_topk": "megatron-core's routers",
    "handle_error": "socketserver",
    "init_communicator": "TRL's VLLMClient",
    "init_info_cls": "vLLM's weight transfer",
    "init_policy_process_group": "NeMo-RL's CheckpointEngine",
    "init_rollout_process_group": "NeMo-RL's CheckpointEngine",
    "init_transfer_engine": "vLLM's weight transfer",
    "init_weight_transfer": "TRL's WeightTransferProtocol",
    "launch": "verifiers' Harness",
    "log_message": "http.server",
    "measured_bytes": "MicroBatchStats, which programs of one's own read",
    "optimizer_config": "a field of the Tinker API",
    "parse_init_info": "vLLM's weight transfer",
    "pop_pushed_lora_or_checkpoint": "TrainerRank, for programs of one's own",
    "predicted_bytes": "MicroBatchStats, which programs of one's own read",
    "project_id": "a field of the Tinker API",
    "pytest_configure": "pytest",
    "pytest_generate_tests": "pytest",
    "pytest_runtest_logreport": "pytest",
    "record_event": "torch.cuda.Stream's method, in megatron-core without a GPU",
    "reduce_scatter": "vLLM's group of ranks",
    "sdk_version": "a field of the Tinker API",
    "supports_draft_weight_update": "vLLM's weight transfer",
    "update_info_cls": "vLLM's weight transfer",
    "update_named_params": "TRL's VLLMClient",
    "wait_stream": "torch.cuda.Stream's method, in megatron-core without a GPU",
}
"""Names that others than this repository use, and who does."""


def files(*places: str) -> Iterator[Path]:
    """The files in these folders, tests and what was built aside."""
    for place in places:
        path = ROOT / place
        for each in [path] if path.is_file() else sorted(path.rglob("*")):
            if each.is_file() and not {"tests", "integration", "build", "__pycache__"} & set(
                each.relative_to(ROOT).parts
            ):
                yield each


def used(path: Path) -> Iterator[str]:
    """Names that a file uses."""
    if path.suffix in {".md", ".toml"} and path.name != "architecture.md":
        yield from re.findall(r"\w+", path.read_text())
    if path.suffix != ".py":
        return
    tree = ast.parse(path.read_text())
    docstrings = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        match node:
            case ast.Name(id=name, ctx=ast.Load()) | ast.Attribute(attr=name, ctx=ast.Load()):
                yield name
            case ast.ImportFrom(names=names):
                yield from (alias.name for alias in names if alias.asname)
            case ast.Constant(value=str() as text) if id(node) not in docstrings:
                for word in re.findall(r"\w+", text):
                    yield from (word, f"_{word}")  # methods of requests are found by the request's kind


def defined(tree: ast.Module | ast.ClassDef) -> Iterator[tuple[int, str]]:
    """Line and name of everything that a module and its classes define, and that no decorator may have registered."""
    for node in tree.body:
        match node:
            case (
                ast.ClassDef(name=name, decorator_list=decorators)
                | ast.FunctionDef(name=name, decorator_list=decorators)
                | ast.AsyncFunctionDef(name=name, decorator_list=decorators)
            ):
                if all(set(re.findall(r"\w+", ast.unparse(each).split("(")[0])) & PLAIN for each in decorators):
                    yield node.lineno, name
                if isinstance(node, ast.ClassDef):
                    yield from defined(node)
            case ast.Assign(targets=targets):
                yield from ((node.lineno, each.id) for each in targets if isinstance(each, ast.Name))
            case ast.AnnAssign(target=ast.Name(id=name)):
                yield node.lineno, name


def main() -> int:
    """Write what nothing uses; the number of such names."""
    known = {name for path in files(*USERS) for name in used(path)}
    found = [
        f"{path.relative_to(ROOT)}:{line}: nothing uses {name}"
        for path in files(*PRODUCT)
        if path.suffix == ".py"
        for line, name in defined(ast.parse(path.read_text()))
        if name not in known and name not in USED_ELSEWHERE and not name.startswith(("__", "test_"))
    ]
    sys.stdout.write("".join(f"{each}\n" for each in found))
    return len(found)


if __name__ == "__main__":
    sys.exit(main() > 0)
