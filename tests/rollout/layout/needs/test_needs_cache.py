"""The cache of what ranks need: an answer is found once, and whatever becomes of its file costs no more than finding it again."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tiny_models import make_qwen3

from weightlane.ckpt_engines import ProtocolError
from weightlane.rollout.layout.offline import needs_cache
from weightlane.rollout.layout.offline.needs_cache import CACHE_ENV, remembered

ROOT = Path(__file__).parents[4]
ANSWER = {"ranks": [[["w", [2, 2], "float32", [[[0, 0], [1, 2]]]]]], "why": ""}


class Asker:
    """Asks the same question about the same model, and counts how often the answer has to be found."""

    def __init__(self, model: Path, folder: Path) -> None:
        self.model, self.folder, self.found = model, folder, 0

    def ask(self, **asked: Any) -> Any:
        return remembered(self.model, asked, self._parse, self._find)

    def file(self) -> Path:
        (file,) = self.folder.iterdir()
        return file

    def _parse(self, answer: Any) -> Any:
        if answer != ANSWER:
            raise ProtocolError("not the answer.", part="test")
        return answer

    def _find(self) -> Any:
        self.found += 1
        return ANSWER


@pytest.fixture
def asker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Asker:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv(CACHE_ENV, raising=False)
    return Asker(make_qwen3(tmp_path / "model", seed=1), tmp_path / "cache" / "weightlane" / "layouts")


def test_an_answer_is_found_once_and_anew_for_whatever_it_depends_on(
    asker: Asker, monkeypatch: pytest.MonkeyPatch
) -> None:
    for _ in range(2):
        assert asker.ask(tensor_parallel=1) == ANSWER
    assert asker.found == 1
    assert asker.file().stat().st_mode & 0o777 == 0o600
    asker.ask(tensor_parallel=2)
    config = asker.model / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"rope_theta": 5e5}))
    asker.ask(tensor_parallel=1)
    monkeypatch.setenv("VLLM_USE_SOMETHING", "1")
    asker.ask(tensor_parallel=1)
    make_qwen3(asker.model, seed=1, vocab=640)
    asker.ask(tensor_parallel=1)
    monkeypatch.setattr(needs_cache.metadata, "version", lambda name: "another")
    asker.ask(tensor_parallel=1)
    assert asker.found == 6
    monkeypatch.setenv(CACHE_ENV, "off")
    asker.ask(tensor_parallel=1)
    assert asker.found == 7


@pytest.mark.parametrize(
    "spoil",
    [
        lambda file: file.write_bytes(file.read_bytes()[:-7]),
        lambda file: file.write_text("[" * 100_000),
        lambda file: file.write_text("[1]"),
    ],
    ids=["torn", "deep", "odd"],
)
def test_a_file_that_holds_no_answer_is_as_good_as_none(asker: Asker, spoil: Callable[[Path], object]) -> None:
    asker.ask()
    spoil(asker.file())
    assert asker.ask() == ANSWER
    assert asker.found == 2


def test_the_oldest_are_forgotten_and_so_is_what_cannot_be_kept(asker: Asker, monkeypatch: pytest.MonkeyPatch) -> None:
    most = 3
    monkeypatch.setattr(needs_cache, "MOST_FILES", most)
    asker.ask(number=0)
    for number in range(1, most + 3):
        asker.ask(number=number)
    kept = list(asker.folder.iterdir())
    assert len(kept) == most
    assert all(file.suffix == ".json" for file in kept)
    asker.ask(number=most + 2)
    assert asker.found == most + 3
    shutil.rmtree(asker.folder)
    asker.folder.write_text("not a directory")
    for found in (most + 4, most + 5):
        assert asker.ask() == ANSWER
        assert asker.found == found, "what cannot be kept is found every time"


def test_no_worker_reads_the_cache() -> None:
    """A file that somebody has changed can make a plan wrong, and no weight."""

    def named(name: str) -> set[str]:
        files = [file for folder in ("rollout", "cli", "sync", "trainer") for file in (ROOT / folder).rglob("*.py")]
        return {str(file.relative_to(ROOT)) for file in files if file.stem != name and name in file.read_text()}

    assert named("needs_cache") == {"rollout/layout/offline/planned_needs.py"}
    assert named("offline.planned_needs import") == {"rollout/vllm/engine.py"}
    assert named(").planned_needs(") == {"cli/commands/check.py", "cli/commands/plan.py"}, "which start no worker"
