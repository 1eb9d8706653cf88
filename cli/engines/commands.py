"""Arguments and options of the commands about engines. Each command imports what it needs, as in `weightlane.cli.main`."""

from __future__ import annotations

import json
import shlex
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from weightlane.ckpt_engines import ConfigError

from ..exit_codes import FAILED, REFUSED
from ..extras import engine_kind, require


def engines(
    *,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
    markdown: Annotated[
        bool,
        typer.Option("--markdown", help="Print a reference of the checkpoint engines and their options as Markdown."),
    ] = False,
    of: Annotated[str, typer.Option(metavar="DIST", help="With --markdown: only engines of this distribution.")] = "",
) -> None:
    """List the installed engines that carry weights, train, and generate, and why some of them cannot run here."""
    from ..output import console, own_stdout
    from .listing import engine_tables, listings
    from .reference import engine_reference

    with own_stdout() as out:
        if markdown:
            typer.echo(engine_reference(of), file=out, nl=False)
            return
        found = listings()
        if as_json:
            typer.echo(json.dumps(found, indent=2), file=out)
            return
        console(out, soft_wrap=False).print(*engine_tables(found))


def doctor(
    names: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[NAME]...", help="Commands, extras or engines that must work here.", show_default=False
        ),
    ] = None,
    *,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Show what this machine has, what will not work on it, and the way out for each.

    Exit code 2 if something is broken, or if one of the names cannot be used.
    """
    from ..output import console, own_stdout
    from .doctor import all_work, diagnose, findings_table

    with own_stdout() as out:
        findings = diagnose()
        works = all_work(findings, names or [])
        if as_json:
            typer.echo(json.dumps({"works": works, "findings": list(map(asdict, findings))}, indent=2), file=out)
        else:
            console(out, soft_wrap=False).print(findings_table(findings))
    if not works:
        raise typer.Exit(REFUSED)


def new_engine(
    name: Annotated[
        str,
        typer.Argument(
            help="Name of the new engine, for checkpoint_engine.backend, trainer.engine or rollout.engine.",
            show_default=False,
        ),
    ],
    *,
    training: Annotated[bool, typer.Option("--training", help="A training engine, not a checkpoint engine.")] = False,
    rollout: Annotated[bool, typer.Option("--rollout", help="A rollout engine, not a checkpoint engine.")] = False,
    out: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="New directory; by default weightlane-NAME in this one.", show_default=False),
    ] = None,
) -> None:
    """Create a package with a small working engine, in which you replace the transport, training or generation by yours."""
    from .new_engine import make_engine_package

    kind = _asked_for(training=training, rollout=rollout)
    where = make_engine_package(name, out, kind or "checkpoint")
    typer.echo(f"{where} contains an engine called {name} that passes the conformance suite. Next:")
    typer.echo(f"    python -m pip install -e {shlex.quote(f'{where.absolute()}[test]')}")
    typer.echo(f"    weightlane conformance {f'--{kind} ' if kind else ''}{name}")


def conformance(
    name: Annotated[
        str, typer.Argument(help="An installed engine, module:Class, or file.py:Class.", show_default=False)
    ],
    *,
    settings: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="K=V",
            help="Set an option of the engine, or a key of the trainer or rollout section for engines of these; repeatable.",
        ),
    ] = None,
    training: Annotated[
        bool, typer.Option("--training", help="Take the training engine where a checkpoint engine has the same name.")
    ] = False,
    rollout: Annotated[
        bool,
        typer.Option("--rollout", help="Take the rollout engine where an engine of another kind has the same name."),
    ] = False,
    check: Annotated[list[str] | None, typer.Option(help="Run only the check of this name; repeatable.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of lines.")] = False,
    out: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Also write a JUnit report.", show_default=False)
    ] = None,
) -> None:
    """Check that an engine keeps every promise of its contract: a checkpoint engine, a training engine or a rollout engine.

    Exit code 1 if it does not.
    """
    kind = _asked_for(training=training, rollout=rollout) or engine_kind(name)
    require("conformance" if kind == "checkpoint" else f"conformance --{kind}")
    from .conformance import check_engine

    if not check_engine(name, settings or [], kind=kind, checks=check or [], as_json=as_json, junit=out):
        raise typer.Exit(FAILED)


def _asked_for(*, training: bool, rollout: bool) -> str:
    """The kind of engine that two options ask for; empty if none. Raises `ConfigError` for both."""
    if training and rollout:
        raise ConfigError(
            "--training and --rollout are two kinds of engines.", part="command", hint="Give one of them."
        )
    return "training" if training else "rollout" if rollout else ""
