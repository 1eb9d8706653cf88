"""The command line."""

from __future__ import annotations

import asyncio
import json
import logging
import shlex
import signal
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from rich.table import Table
from rich.text import Text
from typer.core import TyperGroup

from weightlane.ckpt_engines import CheckpointEngineRegistry, ConfigError, EngineListing, WeightlaneError
from weightlane.ckpt_engines.new_engine import make_engine_package
from weightlane.ckpt_engines.reference.engine_reference import engine_reference

from .config import explain, load_config
from .exit_codes import FAILED, INTERRUPTED, TERMINATED, exit_code_of
from .output import console, own_stdout


class _TerminatedError(BaseException):
    """SIGTERM, as Ctrl-C is `KeyboardInterrupt`."""


def _end_by_sigterm(*_: object) -> NoReturn:
    raise _TerminatedError


class _Commands(TyperGroup):
    """Ends with one line on standard error and an exit code for whatever a user can cause; typer does so for wrong usage."""

    def invoke(self, ctx: Any) -> Any:
        """Run the command that `ctx`, a click context, names."""
        errors = console(stderr=True)
        try:
            return super().invoke(ctx)
        except WeightlaneError as error:
            errors.print(Text.assemble(("error:", "bold red"), f" {error}"))
            raise typer.Exit(exit_code_of(error)) from error
        except KeyboardInterrupt:
            errors.print("interrupted; everything this run started has ended")
            raise typer.Exit(INTERRUPTED) from None
        except (_TerminatedError, asyncio.CancelledError):  # `run_training` is cancelled by SIGTERM only
            errors.print("terminated; everything this run started has ended")
            raise typer.Exit(TERMINATED) from None


app = typer.Typer(
    cls=_Commands,
    help="Carries freshly trained weights from trainers to rollout workers while both keep working.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)

ConfigArgument = Annotated[Path, typer.Argument(help="TOML file of the run.", show_default=False)]
SetOption = Annotated[list[str] | None, typer.Option("--set", metavar="A.B=C", help="Override one key; repeatable.")]


@app.command()
def engines(
    *,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
    markdown: Annotated[bool, typer.Option("--markdown", help="Print the engine reference: options too.")] = False,
    of: Annotated[str, typer.Option(metavar="DIST", help="With --markdown: engines of this distribution only.")] = "",
) -> None:
    """List every installed checkpoint engine, and why it cannot be used here where it cannot."""
    with own_stdout() as out:
        if markdown:
            typer.echo(engine_reference(of), file=out, nl=False)
            return
        rows = CheckpointEngineRegistry().list()
        if as_json:
            typer.echo(json.dumps([_plain(row) for row in rows], indent=2), file=out)
            return
        console(out, soft_wrap=False).print(_engine_table(rows))


@app.command()
def new_engine(
    name: Annotated[
        str, typer.Argument(help="What users will write as checkpoint_engine.backend.", show_default=False)
    ],
    *,
    directory: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Where to; weightlane-NAME here by default.", show_default=False)
    ] = None,
) -> None:
    """Make a package for a checkpoint engine of your own: a small one that works, to put your transport into."""
    where = make_engine_package(name, directory)
    typer.echo(f"{where} is an engine called {name} that passes the conformance suite. Next:")
    typer.echo(f"    python -m pip install -e {shlex.quote(f'{where.absolute()}[test]')}")
    typer.echo(f"    weightlane conformance {name}")


@app.command()
def conformance(
    name: Annotated[str, typer.Argument(help="An installed engine, or file.py:Class.", show_default=False)],
    *,
    settings: Annotated[
        list[str] | None, typer.Option("--set", "--options", metavar="K=V", help="An option of the engine; repeatable.")
    ] = None,
    check: Annotated[list[str] | None, typer.Option(help="Run only this check, by its name; repeatable.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of lines.")] = False,
    junit: Annotated[Path | None, typer.Option(metavar="FILE", help="Write a JUnit report too.")] = None,
) -> None:
    """Check that a checkpoint engine keeps every promise of the contract; exit code 1 when it does not."""
    try:
        from .commands.conformance import check_engine  # noqa: PLC0415 - needs an extra
    except ImportError as error:
        raise ConfigError(
            "pytest is not installed.", part="conformance", hint="pip install 'weightlane[conformance]'."
        ) from error
    if not check_engine(name, settings or [], checks=check or [], as_json=as_json, junit=junit):
        raise typer.Exit(FAILED)


@app.command()
def bench(
    *,
    engine: Annotated[str, typer.Option(metavar="A,B", help="Checkpoint engines to measure.")] = "shm",
    codec: Annotated[str, typer.Option(metavar="A,B", help="Codecs to measure each with.")] = "dense",
    integrity: Annotated[str, typer.Option(metavar="A,B", help="Levels of integrity to measure each with.")] = "full",
    model: Annotated[
        str,
        typer.Option(help="tiny, qwen3-0.6b, -1.7b, -4b, -8b, many-small, or a directory of safetensors files."),
    ] = "tiny",
    device: Annotated[str, typer.Option(help="Where parameters lie: cpu, or cuda.")] = "cpu",
    devices: Annotated[int, typer.Option(help="GPUs, of which the processes take one each in turn.")] = 1,
    receivers: Annotated[int, typer.Option(help="Processes that take the weights.")] = 2,
    density: Annotated[float, typer.Option(help="Share of the elements that changes from version to version.")] = 0.01,
    rounds: Annotated[int, typer.Option(help="How often everything is measured; one more is left out.")] = 5,
    step_s: Annotated[
        float | None,
        typer.Option(
            help="Seconds from publishing to the fence; by default 1.5 times the snapshot.", show_default=False
        ),
    ] = None,
    loops: Annotated[bool, typer.Option("--loops", help="Measure, too, how loops of computation slow down.")] = False,
    bucket_mib: Annotated[
        float | None, typer.Option(help="Size of a bucket; by default that of sync.bucket_mib.", show_default=False)
    ] = None,
    threads: Annotated[int, typer.Option(help="Threads of torch in every process.")] = 1,
    seed: Annotated[int, typer.Option(help="Of the weights and of what changes.")] = 0,
    deadline_s: Annotated[float, typer.Option(help="Seconds any single thing may take.")] = 120.0,
    directory: Annotated[
        Path | None, typer.Option("--dir", help="For files; a temporary one by default.", show_default=False)
    ] = None,
    settings: Annotated[
        list[str] | None, typer.Option("--set", metavar="ENGINE.K=V", help="An option of an engine; repeatable.")
    ] = None,
    json_file: Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Write the figures as JSON.")] = None,
    plot_file: Annotated[Path | None, typer.Option("--plot", metavar="FILE", help="Draw them.")] = None,
) -> None:
    """Measure what a sync costs here, against plain copies, bare transports and the way that stops both sides.

    Exit code 1 when no engine could run, or when what arrived was not what was sent.
    """
    from .commands.bench import listed, measure  # noqa: PLC0415 - loads torch

    done = measure(
        settings or [],
        json_file=json_file,
        plot_file=plot_file,
        engines=listed(engine),
        codecs=listed(codec),
        integrity=listed(integrity),
        model=model,
        device=device,
        devices=devices,
        receivers=receivers,
        density=density,
        rounds=rounds,
        step_s=step_s,
        loops=loops,
        bucket_mib=bucket_mib,
        threads=threads,
        seed=seed,
        deadline_s=deadline_s,
        directory=directory,
    )
    if not done:
        raise typer.Exit(FAILED)


@app.command()
def layout(
    model: Annotated[
        str, typer.Argument(help="Checkpoint directory, or a model whose files are here.", show_default=False)
    ],
    *,
    tp: Annotated[int, typer.Option(metavar="N", help="Tensor-parallel ranks of a replica.")] = 1,
    ep: Annotated[bool, typer.Option("--ep", help="Whole experts on each rank: rollout.expert_parallel.")] = False,
    dtype: Annotated[str, typer.Option(help="Data type the replica computes in; auto: the checkpoint's.")] = "auto",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Show where vLLM puts each tensor of a model, rank by rank, and what cannot be committed by copies."""
    from weightlane.rollout.layout.offline.layout_report import layout_report  # noqa: PLC0415 - loads torch

    from .commands.layout import print_layout  # noqa: PLC0415 - for this command only

    report = layout_report(model, tensor_parallel=tp, dtype=dtype, expert_parallel=ep)
    if as_json:
        typer.echo(json.dumps(report, indent=2))
        return
    print_layout(console(), report)


@app.command()
def plan(
    what: Annotated[
        str,
        typer.Argument(
            metavar="CONFIG|SHAPE", help="TOML file of a run, or a known shape: 30b, 235b or 1t.", show_default=False
        ),
    ],
    override: SetOption = None,
    *,
    trainer: Annotated[
        str,
        typer.Option(metavar="LAYOUT", help="Of a shape: trainer ranks, e.g. 'pp8 ep32', 'tp2 pp4 dp8' or 'fsdp64'."),
    ] = "",
    rollout: Annotated[
        str, typer.Option(metavar="LAYOUT", help="Of a shape: rollout ranks, e.g. '8x tp16 ep16'.")
    ] = "",
    wire: Annotated[str, typer.Option(help="Of a shape: bf16 by default, or fp8 with its scales.")] = "",
    gb_per_s: Annotated[float, typer.Option(help="GB/s of every rank's network card.")] = 50.0,
    sender_gbps: Annotated[
        float | None, typer.Option(help="Gbit/s of a trainer rank's card instead.", show_default=False)
    ] = None,
    receiver_gbps: Annotated[
        float | None, typer.Option(help="Gbit/s of a rollout rank's card instead.", show_default=False)
    ] = None,
    latency_us: Annotated[float, typer.Option(help="Microseconds that a bucket is on its way.")] = 20.0,
    bucket_mib: Annotated[
        float | None, typer.Option(help="Size of a bucket; by default sync.bucket_mib.", show_default=False)
    ] = None,
    cut: Annotated[
        str, typer.Option(help="Of a shape: exact by default, or shares where receivers look at senders' memory.")
    ] = "",
    relay: Annotated[bool, typer.Option("--relay", help="Receivers may hand on what they get.")] = False,
    links: Annotated[int, typer.Option(help="How many of the busiest links are listed.", min=0)] = 5,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
) -> None:
    """Show who would send what to whom, and how long it should take: for a run, or for a model and layouts of its ranks."""
    from .commands.plan import network_of, print_plan, run_report, shape_report  # noqa: PLC0415 - loads torch

    network = network_of(gb_per_s, sender_gbps, receiver_gbps, latency_us, bucket_mib)
    path, of_shapes = Path(what), {"trainer": trainer, "rollout": rollout, "wire": wire, "cut": cut}
    if path.suffix == ".toml" or path.is_file():
        if given := next((name for name, value in of_shapes.items() if value), None):
            raise ConfigError(
                f"--{given} is for shapes; a run's configuration says it.", part="plan", hint="Use --set."
            )
        report = run_report(path, override or [], network, keep_bucket=bucket_mib is not None, relay=relay, links=links)
    else:
        if override:
            raise ConfigError(f"--set is for the configuration of a run, and {what!r} is none.", part="plan")
        report = shape_report(
            what,
            trainer=trainer,
            rollout=rollout,
            wire=wire or "bf16",
            network=network,
            cut=cut or "exact",
            may_relay=relay,
            links=links,
        )
    if as_json:
        typer.echo(json.dumps(report, indent=2))
        return
    print_plan(console(), report)


@app.command()
def config(path: ConfigArgument, override: SetOption = None) -> None:
    """Print the resolved configuration as TOML, every key with its meaning and default."""
    typer.echo(explain(load_config(path, override or [])))


@app.command()
def export(
    run: Annotated[Path, typer.Argument(help="Directory of a run.", show_default=False)],
    *,
    out: Annotated[Path, typer.Option(metavar="DIR", help="Where to; must not exist.", show_default=False)],
    step: Annotated[int | None, typer.Option(help="A saved step; by default the newest.", show_default=False)] = None,
    dtype: Annotated[str, typer.Option(help="Of the weights; auto: that of the model the run began with.")] = "auto",
) -> None:
    """Write a state that a run has saved as a Hugging Face model, in one process, whatever ranks saved it."""
    from .commands.export import export_state  # noqa: PLC0415 - loads torch and transformers

    typer.echo(f"step {export_state(run, step, out, dtype)} of {run} is in {out}")


@app.command()
def check(path: ConfigArgument, override: SetOption = None) -> None:
    """Say before anything is started what a run would take, and what is wrong or does not fit; exit code 2 then."""
    from .commands.check import check_run  # noqa: PLC0415 - loads torch and transformers

    check_run(path.resolve(), override or [], console())


@app.command()
def train(
    path: ConfigArgument,
    override: SetOption = None,
    *,
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the last saved step of run.dir.")] = False,
    plain: Annotated[bool, typer.Option("--plain", help="Print lines instead of a live display.")] = False,
    address: Annotated[str, typer.Option(help="Ray cluster to run on; the same as ray.address.")] = "",
) -> None:
    """Run fully-async RL: rollouts generate, the trainer trains, new weights stream across in the background."""
    from .commands.train import run_training  # noqa: PLC0415 - loads torch, Ray and transformers

    # What is worth knowing is on the display; without a handler Python would print warnings beside it.
    logging.getLogger("weightlane").addHandler(logging.NullHandler())
    overrides = [*(override or []), *([f'ray.address="{address}"'] if address else [])]
    asyncio.run(run_training(path.resolve(), overrides, resume=resume, live=not plain and sys.stdout.isatty()))


def _engine_table(rows: Sequence[EngineListing]) -> Table:
    table = Table("engine", "distribution", "devices", "delivery", "also", "available")
    for row in rows:
        facts = _plain(row)["capabilities"] or {"devices": [], "delivery": []}
        also = [name.replace("_", " ") for name, value in facts.items() if value is True]
        texts = (row.name, row.distribution, ", ".join(facts["devices"]), ", ".join(facts["delivery"]), ", ".join(also))
        usable = Text("yes", "green") if row.unavailable is None else Text.assemble(("no: ", "red"), row.unavailable)
        table.add_row(*map(Text, texts), usable)
    return table


def _plain(row: EngineListing) -> dict[str, Any]:
    facts = asdict(row)
    if row.capabilities is not None:
        facts["capabilities"] |= {
            "devices": sorted(row.capabilities.devices),
            "delivery": sorted(row.capabilities.delivery),
        }
    return facts


def main() -> None:
    """Entry point of the ``weightlane`` command."""
    signal.signal(signal.SIGTERM, _end_by_sigterm)
    app()
