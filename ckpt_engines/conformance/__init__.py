"""The conformance suite: it checks that a checkpoint engine keeps every promise of the contract.

Install it with ``pip install 'weightlane[conformance]'``. For an installed engine, or a class in a file:

    weightlane conformance shm
    weightlane conformance ./my_engine.py:MyEngine --set host=127.0.0.1

To run it as part of an engine's own tests, override two fixtures in a module that pytest collects:

>>> import pytest
>>> from weightlane.ckpt_engines.conformance import EngineConformance
>>> class TestShm(EngineConformance):
...     @pytest.fixture
...     def engine_name(self):
...         return "shm"
...
...     @pytest.fixture
...     def engine_options(self, tmp_path):
...         return {"socket_dir": str(tmp_path)}

The suite runs each half of the engine in a process of its own, and kills, freezes and closes it there. The engine's
`Capabilities` decide which checks run; the others are skipped with the reason. `EngineConformance.expected_failures` lists checks
that an engine cannot pass for a reason outside it. A check's docstring says how its promise is tried.

Further multi-process tests of an engine can use the same parts: derive their class from `ConformanceBase`, override the same
fixtures, and use the fixtures ``connected`` or ``halves``.

The suite needs Linux and pytest, in addition to the requirements of weightlane itself.
"""

try:
    import pytest
except ImportError as error:
    raise ModuleNotFoundError(
        "the conformance suite needs pytest: pip install 'weightlane[conformance]'", name=error.name
    ) from error

# Failed assertions of every check then show the compared values.
pytest.register_assert_rewrite(f"{__name__}.checks", f"{__name__}.processes")

from .checks import EngineConformance  # noqa: E402
from .checks.base import ConformanceBase, ConnectionMaker  # noqa: E402 - after the rewriting
from .processes.connection import Connection  # noqa: E402
from .processes.payload import Parcel  # noqa: E402
from .pytest_run import CheckOutcome, CheckResult, SuiteReport  # noqa: E402
from .runner import ConformanceReport, run_conformance  # noqa: E402

__all__ = [
    "CheckOutcome",
    "CheckResult",
    "ConformanceBase",
    "ConformanceReport",
    "Connection",
    "ConnectionMaker",
    "EngineConformance",
    "Parcel",
    "SuiteReport",
    "run_conformance",
]
