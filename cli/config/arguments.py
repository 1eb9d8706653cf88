"""Arguments and options that several commands of ``weightlane`` have, and how they are read."""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Annotated

import typer

from ..extras import require
from .toml_file import starts_vllm


def _show_version(asked: bool) -> None:
    if asked:
        typer.echo(f"weightlane {version('weightlane')}")
        raise typer.Exit


VersionOption = Annotated[
    bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version and exit.")
]
ConfigArgument = Annotated[Path, typer.Argument(help="TOML file of the run.", show_default=False)]
SetOption = Annotated[
    list[str] | None, typer.Option("--set", metavar="A.B=C", help="Override a key of the configuration; repeatable.")
]

ResumeOption = Annotated[bool, typer.Option("--resume", help="Resume from the last saved step in run.dir.")]
PlainOption = Annotated[bool, typer.Option("--plain", help="Print lines instead of a live table.")]

SenderSpeedOption = Annotated[
    float, typer.Option(help="Gbit/s of a trainer rank's network card; 0: no seconds are shown.", min=0)
]
ReceiverSpeedOption = Annotated[
    float, typer.Option(help="Gbit/s of a rollout rank's network card; 0: no seconds are shown.", min=0)
]
LinksOption = Annotated[int, typer.Option(help="Number of busiest links to list.", min=0)]


def keep_logs_off_the_terminal() -> None:
    """Keep logged warnings off standard error. A run's display shows everything important."""
    logging.getLogger("weightlane").addHandler(logging.NullHandler())


def is_live(*, plain: bool) -> bool:
    """Whether the run's display is a live table: on a terminal, unless the user wants it `plain`."""
    return not plain and sys.stdout.isatty()


def require_for(command: str, path: Path, overrides: Sequence[str], *, loads_vllm: bool = False) -> None:
    """Raise `ConfigError` if a library is missing that `command` needs here for the configuration at `path`.

    On a running Ray cluster, vLLM is on other machines, and `loads_vllm` says that the command needs it here all the same.
    """
    require(command, without=() if starts_vllm(path, overrides, anywhere=loads_vllm) else ("vllm",))
