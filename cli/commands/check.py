"""``weightlane check`` shows what a run would need, or what is wrong with it, without starting anything."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from weightlane.sync import Rendezvous

from ..run.preparation import prepare
from ..run.resources import Machines, Sizes, described, fitted


def check_run(path: Path, overrides: Sequence[str], console: Console) -> None:
    """Print the resources that the configuration at the absolute `path` needs. Raises the errors of `weightlane train`.

    With ``ray.address``, the machines of the cluster are assumed to have the GPUs of this machine.
    """
    ready = prepare(path, overrides)
    config = ready.config
    Rendezvous.host(config.sync.host, config.sync.port)
    machines, sizes = Machines.here(), Sizes.of(config, ready.model)
    config = fitted(config, sizes, machines, counted=not config.ray.address)
    table = Table(title=f"{escape(str(path))} can run", title_justify="left", show_header=False)
    for name, amount in described(config, sizes, machines):
        table.add_row(name, escape(amount))
    console.print(table)
