"""The conformance suite: whether a checkpoint engine keeps every promise of the contract.

Install it with ``pip install 'weightlane[conformance]'``. For an installed engine, or a class in a file:

    weightlane conformance shm
    weightlane conformance ./my_engine.py:MyEngine --set host=127.0.0.1

As part of an engine's own tests, override two fixtures in a module that pytest collects:

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

Halves run in processes of their own, as they do in real life, and are killed, frozen and closed there. The engine's
`Capabilities` decide which checks run; the others are skipped with the reason. What an engine cannot do for a reason beyond
it goes to `EngineConformance.expected_failures`. ``docs/guides/conformance.md`` lists what each check proves.

An engine's further multi-process tests can be made of the same parts: derive their class from `ConformanceBase`, override the
same fixtures, and ask for ``connected`` or ``halves``.

Needs Linux and pytest, and nothing else but what weightlane itself needs.
"""

try:
    import pytest
except ImportError as error:
    raise ImportError("the conformance suite needs pytest: pip install 'weightlane[conformance]'") from error

# Failed assertions of every check then show the compared values.
pytest.register_assert_rewrite(f"{__name__}.checks", f"{__name__}.processes")

from .checks.base import ConformanceBase, ConnectionMaker  # noqa: E402 - after the rewriting
from .processes.connection import Connection  # noqa: E402
from .processes.payload import Parcel  # noqa: E402
from .runner import CheckResult, ConformanceReport, Outcome, run_conformance  # noqa: E402
from .suite import EngineConformance  # noqa: E402

__all__ = [
    "CheckResult",
    "ConformanceBase",
    "ConformanceReport",
    "Connection",
    "ConnectionMaker",
    "EngineConformance",
    "Outcome",
    "Parcel",
    "run_conformance",
]
