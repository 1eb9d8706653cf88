"""``weightlane check``: what a run would take, and what is wrong with it, before anything is started."""

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
    """Print what a run of the configuration at the absolute `path` takes. Raises what `weightlane train` would refuse it with.

    With ``ray.address`` the machines of the cluster are not asked: what they have is taken to be what this one has.
    """
    ready = prepare(path, overrides)
    config = ready.config
    Rendezvous.host(config.sync.host, config.sync.port)
    machines, sizes = Machines.here(), Sizes.of(config, ready.model)
    config = fitted(config, sizes, machines, counted=not config.ray.address)
    table = Table(title=f"{escape(str(path))} can run", title_justify="left", show_header=False)
    for what, how_much in described(config, sizes, machines):
        table.add_row(what, escape(how_much))
    console.print(table)
