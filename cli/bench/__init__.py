"""The benchmark measures the cost of a model's sync on this machine, compared with the machine's limits and a blocking sync.

The sender and each receiver are processes of their own. Each round also measures the limits. Every version is compared bit for
bit.

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
