"""The conformance suite for training engines: whether one keeps every promise of `TrainingEngine`.

For an installed engine, or a class in a file:

    weightlane conformance fsdp2
    weightlane conformance fsdp2 --set ranks=2 --set fsdp2.tensor_parallel=2
    weightlane conformance ./my_engine.py:MyEngine

To run it as part of an engine's own tests, derive a class in a module that pytest collects:

>>> from weightlane.trainer.conformance import TrainingEngineConformance
>>> class TestFsdp2(TrainingEngineConformance):
...     engine = "fsdp2"
...     layouts = {
...         "two ranks": {"ranks": 2},
...         "tensor parallel": {"ranks": 2, "fsdp2": {"tensor_parallel": 2}},
...     }

The suite makes tiny models with random weights, runs each rank in a process of its own, and compares outputs, gradients and steps
with plain transformers and torch's AdamW in float64. ``docs/guides/conformance-of-training-engines.md`` lists what each check
proves.

The suite needs Linux, pytest, transformers and safetensors, in addition to the requirements of the engine.
"""

try:
    import pytest
except ImportError as error:
    raise ModuleNotFoundError(
        "the conformance suite needs pytest: pip install 'weightlane[conformance]'", name=error.name
    ) from error

# Failed assertions of every check then show the compared values.
pytest.register_assert_rewrite(f"{__name__}.checks", f"{__name__}.processes")

from .checks import TrainingEngineConformance  # noqa: E402 - after the rewriting
from .checks.base import TrainingConformanceBase  # noqa: E402
from .models import MODELS  # noqa: E402
from .runner import run_training_conformance  # noqa: E402

__all__ = [
    "MODELS",
    "TrainingConformanceBase",
    "TrainingEngineConformance",
    "run_training_conformance",
]
