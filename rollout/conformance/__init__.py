"""The conformance suite for rollout engines: whether one keeps every promise of `RolloutEngine`.

For an installed engine, or a class in a file:

    weightlane conformance --rollout transformers
    weightlane conformance --rollout vllm --set tensor_parallel=2
    weightlane conformance ./my_engine.py:MyEngine

To run it as part of an engine's own tests, derive a class in a module that pytest collects:

>>> from weightlane.rollout.conformance import RolloutEngineConformance
>>> class TestTransformers(RolloutEngineConformance):
...     engine = "transformers"

The suite makes tiny models with random weights, drives the engine by a `LocalReplica` in its own process, and publishes versions
to it with a real publisher. It compares tokens and log-probabilities with plain transformers, loaded from the files of each
version. A check's docstring says how its promise is tried.

The suite needs Linux, pytest, transformers and safetensors, in addition to the requirements of the engine.
"""

try:
    import pytest
except ImportError as error:
    raise ModuleNotFoundError(
        "the conformance suite needs pytest: pip install 'weightlane[conformance]'", name=error.name
    ) from error

# Failed assertions of every check then show the compared values.
pytest.register_assert_rewrite(f"{__name__}.checks", f"{__name__}.serving")

from .checks.base import RolloutConformanceBase  # noqa: E402 - after the rewriting
from .models import MODELS  # noqa: E402
from .runner import run_rollout_conformance  # noqa: E402
from .suite import RolloutEngineConformance  # noqa: E402

__all__ = [
    "MODELS",
    "RolloutConformanceBase",
    "RolloutEngineConformance",
    "run_rollout_conformance",
]
