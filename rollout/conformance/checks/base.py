"""The fixtures and helpers that all checks of the suite share."""

from __future__ import annotations

import tempfile
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch

from weightlane.ckpt_engines import WeightlaneError
from weightlane.ckpt_engines.conformance.checks.shared_fixtures import KnownLimits, OneThread
from weightlane.ckpt_engines.conformance.processes.resolve import class_at, is_place

from ...config import RolloutConfig
from ...contract.engine import RolloutEngine
from ...contract.records import Completion
from ...contract.registry import registered_rollout_engine
from ...contract.requests import Sampling
from ..models import MODELS, Reference, make_model
from ..serving import Serving

LOGPROB_LIMIT = 1e-4
"""Largest difference of a log-probability from that of transformers: both compute in float32, in another order."""
MODEL_LEN = 1024
"""Most tokens of a request."""
SEATS = 8
"""Most requests that the engine decodes in one step."""

ServingMaker = Callable[..., Serving]
Weights = Callable[[int], Mapping[str, torch.Tensor]]
"""Returns the tensors of the first model with weights from a seed."""
References = Callable[[int], Reference]
"""Returns transformers' own first model with weights from a seed."""


class Versions:
    """Models of the suite with weights from several seeds: the files of each, their tensors, and the oracle."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._paths: dict[tuple[Any, ...], Path] = {}
        self._references: dict[Path, Reference] = {}

    def path(self, name: str, seed: int = 0, *, tokenizer: bool = True) -> Path:
        """Directory of the model `name` with weights from `seed`."""
        key = (name, seed, tokenizer)
        if key not in self._paths:
            self._paths[key] = make_model(name, seed, self._folder, tokenizer=tokenizer)
        return self._paths[key]

    def tensors(self, name: str, seed: int) -> dict[str, torch.Tensor]:
        """The tensors in the files of a version, by name."""
        from safetensors.torch import load_file  # noqa: PLC0415 - an extra

        found: dict[str, torch.Tensor] = load_file(self.path(name, seed) / "model.safetensors")
        return found

    def reference(self, name: str, seed: int = 0) -> Reference:
        """Transformers' own model of a version."""
        path = self.path(name, seed)
        if path not in self._references:
            self._references[path] = Reference(path)
        return self._references[path]


VERSIONS = pytest.StashKey[Versions]()
"""Key of the models made in the pytest session."""


class RolloutConformanceBase(KnownLimits, OneThread):
    """Fixtures of the suite. Its user sets `engine`, and `settings` and `models` if the engine takes others."""

    engine: ClassVar[str] = ""
    """Name of the engine under test: an installed one, ``module:Class``, or ``path/to/file.py:Class``."""
    settings: ClassVar[Mapping[str, Any]] = {}
    """Settings of `RolloutConfig` for every replica, but for ``kv_on_commit``, which each check sets."""
    models: ClassVar[Sequence[str]] = MODELS
    """Models of `conformance.models` that the engine can generate with. Checks that need only one take the first."""
    backend: ClassVar[str] = "shm"
    """Name of the checkpoint engine that carries the versions."""
    backend_options: ClassVar[Mapping[str, Any]] = {}
    """Options of that engine."""
    deadline_s: ClassVar[float] = 120.0
    """Seconds within which any call must end."""
    slack_s: ClassVar[float] = 10.0
    """Seconds after `close` within which threads and processes must end."""

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        """Run a check on every model if it asks for one."""
        if "model" in metafunc.fixturenames:
            metafunc.parametrize("model", self.models)

    @pytest.fixture
    def versions(self, request: pytest.FixtureRequest) -> Versions:
        """The suite's models."""
        stash = request.config.stash
        if VERSIONS not in stash:
            folder = tempfile.TemporaryDirectory(prefix="conformance-models-")
            request.config.add_cleanup(folder.cleanup)
            stash[VERSIONS] = Versions(Path(folder.name))
        return stash[VERSIONS]

    @pytest.fixture
    def engine_type(self) -> type[RolloutEngine]:
        """The class under test."""
        return engine_class(self.engine)

    @pytest.fixture
    def make(self, engine_type: type[RolloutEngine]) -> Iterator[ServingMaker]:
        """A function that makes a replica of its own for a check: ``make(model_dir, kv_on_commit="keep")``. It is not started."""
        made: list[Serving] = []

        def new(model_dir: Path, **settings: Any) -> Serving:
            made.append(self._serving(engine_type, model_dir, **settings))
            return made[-1]

        yield new
        for serving in made:
            serving.close()

    @pytest.fixture(scope="class")
    @classmethod
    def shared(cls) -> Iterator[list[Serving]]:
        """The replica that the checks of a class share, since an engine may take long to start; empty if there is none."""
        found: list[Serving] = []
        yield found
        for serving in found:
            serving.close()

    @pytest.fixture
    def serving(self, shared: list[Serving], engine_type: type[RolloutEngine], versions: Versions) -> Serving:
        """A replica of the first model, connected to a trainer. Earlier checks have used it, if they left it healthy."""
        if shared and not shared[0].healthy:
            shared.pop().close()
        if not shared:
            name = self.models[0]
            shared.append(self._serving(engine_type, versions.path(name)))
            self.begin(shared[0], versions.tensors(name, 0))
        return shared[0]

    @pytest.fixture
    def weights(self, versions: Versions) -> Callable[[int], dict[str, torch.Tensor]]:
        """A function that returns the tensors of the first model with weights from a seed."""
        return lambda seed: versions.tensors(self.models[0], seed)

    @pytest.fixture
    def reference(self, versions: Versions) -> Callable[[int], Reference]:
        """A function that returns transformers' own first model with weights from a seed."""
        return lambda seed: versions.reference(self.models[0], seed)

    def begin(self, serving: Serving, tensors: Mapping[str, torch.Tensor]) -> None:
        """Start a replica, and connect it to a trainer of `tensors`."""
        serving.start()
        self.connect(serving, tensors)

    def connect(self, serving: Serving, tensors: Mapping[str, torch.Tensor], **more: Any) -> None:
        """Connect a replica to a new trainer of `tensors`."""
        serving.run(serving.connect(tensors, self.backend, self.backend_options, **more), "connect")

    def _serving(self, engine: type[RolloutEngine], model_dir: Path, **settings: Any) -> Serving:
        limits = ("connect_timeout_s", "request_timeout_s", "commit_timeout_s", "start_timeout_s")
        config = RolloutConfig(
            **{
                "engine": self.engine,
                "dtype": "float32",
                "max_model_len": MODEL_LEN,
                "max_num_seqs": SEATS,
                **dict.fromkeys(limits, self.deadline_s),
                **self.settings,
                "kv_on_commit": "recompute",
                **settings,
            }
        )
        return Serving(engine, config, model_dir, self.deadline_s)


def engine_class(name: str) -> type[RolloutEngine]:
    """Return the engine class of an installed rollout engine, or of ``module:Class`` or ``path/to/file.py:Class``.

    Raises:
        ConfigError: There is no such engine, or it cannot be used.
        RegistryError: The class cannot be loaded, or is not a complete `RolloutEngine`.
    """
    return class_at(name, RolloutEngine) if is_place(name) else registered_rollout_engine(name)  # type: ignore[type-abstract]


def expect_greedy(found: Completion, prompt: Sequence[int], by_version: Mapping[int, Reference], what: str) -> None:
    """Check a greedy completion: each token is decoded by the model of its own version, from all tokens before it.

    Tokens exactly, log-probabilities within `LOGPROB_LIMIT`.
    """
    tokens, stamps = found.token_ids, found.versions
    assert len(found.logprobs) == len(stamps) == len(tokens) > 0, (
        f"expected a log-probability and a version for each token of {what}, there are {len(tokens)} tokens,"
        f" {len(found.logprobs)} log-probabilities and {len(stamps)} versions"
    )
    assert by_version.keys() >= set(stamps), f"expected versions {list(by_version)} in {what}, they are {stamps}"
    sampling = Sampling(len(tokens), greedy=True)
    found_by = {version: by_version[version].distributions(prompt, tokens, sampling) for version in set(stamps)}
    wanted = torch.stack([found_by[version][index] for index, version in enumerate(stamps)])
    best = wanted.argmax(-1).tolist()
    wrong = next((index for index, token in enumerate(tokens) if token != best[index]), None)
    assert wrong is None, (
        f"expected token {wrong} of {what} to be {best[wrong]}, as transformers with version {stamps[wrong]} decodes it, it"
        f" is {tokens[wrong]}"
    )
    expect_close(found.logprobs, wanted.amax(-1), f"log-probabilities of {what}")


def expect_close(found: Sequence[float], wanted: torch.Tensor, what: str) -> None:
    """Check log-probabilities within `LOGPROB_LIMIT`."""
    difference = float((torch.tensor(found, dtype=torch.float64) - wanted).abs().max())
    assert difference <= LOGPROB_LIMIT, (  # also fails for NaN, and for what cannot be drawn
        f"expected {what} within {LOGPROB_LIMIT:g} of transformers', they are {difference:.2g} off"
    )


async def failure_of(
    call: Awaitable[object], kinds: type[WeightlaneError] | tuple[type[WeightlaneError], ...], what: str
) -> WeightlaneError:
    """Await a call that must fail with an error of `kinds`, and return that."""
    named = " or ".join(kind.__name__ for kind in (kinds if isinstance(kinds, tuple) else (kinds,)))
    try:
        returned = await call
    except kinds as error:
        return error
    except Exception as error:
        raise AssertionError(f"expected {named} from {what}, it raised {type(error).__name__}: {error}") from error
    raise AssertionError(f"expected {named} from {what}, it returned {returned}")
