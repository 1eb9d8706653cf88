"""What carrying a model across costs here, against what the machine allows and against the way that stops both sides.

One sender and some receivers, each a process of its own; every figure is taken in turn with the limits, and every version is
compared bit for bit.

>>> from weightlane.cli.bench import BenchSettings, run_bench
>>> report = run_bench(BenchSettings(engines=("shm",), model="tiny", receivers=1, rounds=1))
>>> [(row.name, row.verified) for row in report.rows]
[('shm dense full', True)]
"""

from .measure import run_bench
from .report.bench_report import PHASES, BenchReport, Row, Spread
from .report.table import report_tables, unavailable_table
from .settings import BenchSettings
from .workload.workload import MODELS, Workload, named_workload

__all__ = [
    "MODELS",
    "PHASES",
    "BenchReport",
    "BenchSettings",
    "Row",
    "Spread",
    "Workload",
    "named_workload",
    "report_tables",
    "run_bench",
    "unavailable_table",
]
