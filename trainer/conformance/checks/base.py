"""The fixtures and helpers that all checks of the suite share."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

from weightlane.ckpt_engines.conformance.checks.shared_fixtures import KnownLimits, OneThread
from weightlane.ckpt_engines.conformance.processes.pool import Pool

from ..models import MODELING, MODELS, make_model
from ..processes.team import MODULE, Team

POOL = pytest.StashKey[Pool]()
"""Key of the pytest session's pool of processes."""
MODEL_FILES = pytest.StashKey[dict[str, Path]]()
"""Key of the directories of models made in the pytest session, by name."""
SPLIT = ((0,), (3, 1, 2, 4), (6, 5))
"""Three uneven calls of a mini-batch of seven sequences."""
PROMPT = 18
"""Tokens of a prompt of several sequences, which an engine may compute once."""

TeamMaker = Callable[..., Team]


class TrainingConformanceBase(KnownLimits, OneThread):
    """Fixtures of the suite. Its user sets `engine`, and `layouts` and `models` if the engine takes others."""

    engine: ClassVar[str] = ""
    """Name of the engine under test: an installed one, ``module:Class``, or ``path/to/file.py:Class``."""
    layouts: ClassVar[Mapping[str, Mapping[str, Any]]] = {"one rank": {"ranks": 1}, "two ranks": {"ranks": 2}}
    """Layouts of a model and its batches over ranks: settings of `TrainerConfig`, including ``ranks``, by layout name."""
    models: ClassVar[Sequence[str]] = MODELS
    """Models of `conformance.models` that the engine can train. Checks that need only one take the first."""
    deadline_s: ClassVar[float] = 120.0
    """Seconds for an operation that is expected to succeed. A collective between ranks has half as many."""
    missing_s: ClassVar[float] = 1.0
    """Timeout of collectives, in seconds, in checks in which a rank never joins."""
    slack_s: ClassVar[float] = 10.0
    """Seconds after such a timeout within which an operation must end, and after `close` within which threads must end."""
    prompt_s: ClassVar[float] = 20.0
    """Seconds within which the ranks must notice the death of one of them."""
    grace_s: ClassVar[float] = 15.0
    """Seconds after its deadline at which an operation counts as hanging and its process is killed."""
    preload: ClassVar[Sequence[str]] = ()
    """Modules that are imported once for all processes, to save time. Importing them must not start a thread."""

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        """Run each check in every layout, and on every model if it asks for `each_model`."""
        if "layout" in metafunc.fixturenames:
            metafunc.parametrize("layout", self.layouts.values(), ids=self.layouts, scope="class")
        if "each_model" in metafunc.fixturenames:
            metafunc.parametrize("model", self.models)

    @pytest.fixture
    def pool(self, request: pytest.FixtureRequest) -> Iterator[Pool]:
        """The session's pool of processes. A check's processes return to the pool after it."""
        stash = request.config.stash
        if POOL not in stash:
            stash[POOL] = Pool(MODULE)
            request.config.add_cleanup(stash[POOL].close)
        stash[POOL].preload((*MODELING, *self.preload))
        yield stash[POOL]
        stash[POOL].take_back()

    @pytest.fixture
    def model_dir(self, request: pytest.FixtureRequest) -> Callable[[str], Path]:
        """A function that makes a model of the suite, by name, and returns its directory."""
        stash = request.config.stash
        if MODEL_FILES not in stash:
            folder = tempfile.TemporaryDirectory(prefix="conformance-models-")
            request.config.add_cleanup(folder.cleanup)
            stash[MODEL_FILES] = {"": Path(folder.name)}
        made = stash[MODEL_FILES]

        def directory(name: str) -> Path:
            if name not in made:
                made[name] = make_model(name, made[""])
            return made[name]

        return directory

    @pytest.fixture
    def each_model(self, model: str, model_dir: Callable[[str], Path], team: Team) -> Path:
        """Directory of each of `models`. Skips a check if the engine refuses the model in this layout."""
        path = model_dir(model)
        if model != self.models[0] and (reason := team.refusal(path)):
            pytest.skip(f"the engine refuses {model} in this layout: {reason}")
        return path

    @pytest.fixture
    def first_model(self, model_dir: Callable[[str], Path]) -> Path:
        """Directory of the first of `models`."""
        return model_dir(self.models[0])

    @pytest.fixture
    def teams(self, pool: Pool, tmp_path: Path) -> TeamMaker:
        """A function that makes the ranks of a layout: ``teams(layout)``, or some of them: ``teams(layout, ranks=1)``."""

        def make(layout: Mapping[str, Any], **more: Any) -> Team:
            trainer = {
                "engine": self.engine,
                "device": "cpu",
                "compute_dtype": "float32",  # also on a GPU, where the default is narrower than the checks' tolerances
                "collective_timeout_s": self.deadline_s / 2,
                **layout,
            }
            files = tmp_path / "files"
            files.mkdir(exist_ok=True)
            limits = {"deadline_s": self.deadline_s, "grace_s": self.grace_s}
            return Team(pool, self.engine, trainer, files, **{**limits, **more})

        return make

    @pytest.fixture
    def team(self, teams: TeamMaker, layout: Mapping[str, Any]) -> Team:
        """The ranks of the layout, without engines set up yet."""
        return teams(layout)


def expect_equal(found: Mapping[str, torch.Tensor], wanted: Mapping[str, torch.Tensor], what: str) -> None:
    """Check that two sets of tensors have the same names and are equal bit for bit."""
    assert found.keys() == wanted.keys(), (
        f"expected {what} by the same names, they differ in {sorted(found.keys() ^ wanted.keys())}"
    )
    other = [name for name, each in wanted.items() if found[name].dtype != each.dtype or not found[name].equal(each)]
    assert not other, f"expected {what} bit for bit, other are {', '.join(other)}"


def expect_close(found: torch.Tensor, wanted: torch.Tensor, limit: float, what: str) -> None:
    """Check shape and values, float32 against float64, within `limit`."""
    assert found.shape == wanted.shape, f"expected {what} of shape {list(wanted.shape)}, it is {list(found.shape)}"
    assert found.dtype == torch.float32, f"expected {what} in float32, it is {found.dtype}"
    difference = float((found.double() - wanted).abs().max())
    assert difference <= limit, f"expected {what} within {limit:g} of the reference, it is {difference:.2g} off"


def expect_same_change(
    found: Mapping[str, torch.Tensor],
    wanted: Mapping[str, torch.Tensor],
    start: Mapping[str, torch.Tensor],
    limit: float,
    what: str,
) -> None:
    """Check that weights changed from `start` as the reference's did, relative to the length of the full change."""
    distance(
        {name: found[name].double() - start[name].double() for name in wanted},
        {name: wanted[name].double() - start[name].double() for name in wanted},
        limit,
        what,
    )


def distance(found: Mapping[str, torch.Tensor], wanted: Mapping[str, torch.Tensor], limit: float, what: str) -> None:
    """Check that the difference of all tensors together is at most `limit` times the length of `wanted`."""
    apart = {name: float((found[name].double() - wanted[name]).norm()) for name in wanted}
    length = float(torch.stack([tensor.double().norm() for tensor in wanted.values()]).norm())
    relative = sum(each**2 for each in apart.values()) ** 0.5 / length
    worst = max(apart, key=lambda name: apart[name])
    assert relative <= limit, (  # also fails for NaN
        f"expected {what} within {limit:g} of the reference, it is {relative:.2g} off, most in {worst}"
    )
