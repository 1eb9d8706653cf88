"""The command line of ``weightlane``: commands, options and exit codes.

It imports nothing slow, so that help, completion and refusals are immediate. Each command imports the modules that it needs.
"""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Annotated, Literal

import typer

from .config.arguments import (
    ConfigArgument,
    LinksOption,
    PlainOption,
    ReceiverSpeedOption,
    ResumeOption,
    SenderSpeedOption,
    SetOption,
    VersionOption,
    is_live,
    keep_logs_off_the_terminal,
    require_for,
)
from .config.toml_file import command_of, read_toml
from .engines.commands import conformance, doctor, engines, new_engine
from .exit_codes import FAILED, Commands, end_by_sigterm
from .extras import require

app = typer.Typer(
    cls=Commands,
    help="Send freshly trained weights from trainers to rollout workers while both keep working.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)


@app.callback()
def options(*, show_version: VersionOption = False) -> None:
    """Take the options of the command itself."""


for command in (engines, doctor, new_engine, conformance):
    app.command()(command)


@app.command()
def bench(
    *,
    engine: Annotated[
        list[str] | None, typer.Option(help="Checkpoint engine to measure, by default shm; repeatable.")
    ] = None,
    codec: Annotated[
        list[str] | None, typer.Option(help="Codec to measure each with, by default dense; repeatable.")
    ] = None,
    integrity: Annotated[
        list[str] | None, typer.Option(help="Level of integrity to measure each with, by default full; repeatable.")
    ] = None,
    model: Annotated[
        str, typer.Option(help="tiny, qwen3-0.6b, -1.7b, -4b, -8b, many-small, or a directory of safetensors files.")
    ] = "tiny",
    device: Annotated[str, typer.Option(help="Device of the parameters: cpu or cuda.")] = "cpu",
    devices: Annotated[int, typer.Option(help="Number of GPUs, which the processes use in turn.")] = 1,
    receivers: Annotated[int, typer.Option(help="Number of receiving processes.")] = 2,
    density: Annotated[float, typer.Option(help="Share of the elements that change from version to version.")] = 0.01,
    rounds: Annotated[int, typer.Option(help="Measured rounds; one more round warms up.")] = 5,
    step_s: Annotated[
        float | None,
        typer.Option(
            help="Seconds from publishing to the fence; by default 1.5 times the snapshot.", show_default=False
        ),
    ] = None,
    loops: Annotated[bool, typer.Option("--loops", help="Also measure how training and decoding slow down.")] = False,
    fit: Annotated[
        bool, typer.Option("--fit", help="Also measure parts of the model: fixed cost and bandwidth of each row.")
    ] = False,
    bucket_mib: Annotated[
        float | None,
        typer.Option(help="Size of a bucket in MiB; by default that of sync.bucket_mib.", show_default=False),
    ] = None,
    threads: Annotated[int, typer.Option(help="Threads of torch in every process.")] = 1,
    seed: Annotated[int, typer.Option(help="Seed of the weights and of their changes.")] = 0,
    deadline_s: Annotated[float, typer.Option(help="Longest time of any single operation in seconds.")] = 120.0,
    work_dir: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Where engines keep files meanwhile; by default /tmp.", show_default=False),
    ] = None,
    settings: Annotated[
        list[str] | None, typer.Option("--set", metavar="ENGINE.K=V", help="Set an option of an engine; repeatable.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
    out: Annotated[
        list[Path] | None,
        typer.Option(
            metavar="FILE", help="Also write the report to *.json, or draw it to *.png, *.svg, ...; repeatable."
        ),
    ] = None,
) -> None:
    """Measure what a sync costs on this machine, beside plain copies, bare transports and a blocking sync.

    Exit code 1 if no engine can run, or if a receiver got wrong bytes.
    """
    if any(file.suffix != ".json" for file in out or ()):
        require("bench --out")
    from .commands.bench import measure

    verified = measure(
        settings or [],
        as_json=as_json,
        out=out or [],
        engines=tuple(engine or ["shm"]),
        codecs=tuple(codec or ["dense"]),
        integrity=tuple(integrity or ["full"]),
        model=model,
        device=device,
        devices=devices,
        receivers=receivers,
        density=density,
        rounds=rounds,
        step_s=step_s,
        loops=loops,
        fit=fit,
        bucket_mib=bucket_mib,
        threads=threads,
        seed=seed,
        deadline_s=deadline_s,
        directory=work_dir,
    )
    if not verified:
        raise typer.Exit(FAILED)


@app.command()
def layout(
    model: Annotated[
        str, typer.Argument(help="Checkpoint directory, or the name of a model in the local cache.", show_default=False)
    ],
    *,
    tp: Annotated[int, typer.Option(metavar="N", help="Tensor-parallel ranks of a replica.")] = 1,
    ep: Annotated[
        bool, typer.Option("--ep", help="Whole experts on each rank, as with rollout.expert_parallel.")
    ] = False,
    dtype: Annotated[
        str, typer.Option(help="Data type that the replica computes in; auto is the checkpoint's.")
    ] = "auto",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Show where vLLM puts each tensor of a model on each rank, and which tensors cannot be committed by copies."""
    require("layout")
    from weightlane.rollout.layout.loading.checkpoint_expectation import checkpoint_files

    checkpoint_files(model)  # says at once that there is no such model; what follows loads vLLM
    from weightlane.rollout.layout.offline.layout_report import layout_report

    from .commands.layout import print_layout
    from .output import console

    report = layout_report(model, tensor_parallel=tp, dtype=dtype, expert_parallel=ep)
    if as_json:
        typer.echo(json.dumps(report, indent=2))
        return
    print_layout(console(), report)


@app.command()
def plan(
    path: ConfigArgument,
    override: SetOption = None,
    *,
    sender_gbps: SenderSpeedOption = 0.0,
    receiver_gbps: ReceiverSpeedOption = 0.0,
    links: LinksOption = 5,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
) -> None:
    """Show the transfer plan of a run: bytes of its links, the busiest ranks, and their bytes over stated speeds."""
    require_for("plan", path, override or [], loads_vllm=True)
    from .commands.plan import print_plan, run_report

    report = run_report(path, override or [], sender_gbps=sender_gbps, receiver_gbps=receiver_gbps, links=links)
    print_plan(report, as_json=as_json)


@app.command()
def plan_shape(
    shape: Annotated[str, typer.Argument(help="A known model: 30b, 235b or 1t.", show_default=False)],
    *,
    trainer: Annotated[
        str,
        typer.Option(metavar="LAYOUT", help="Trainer ranks, such as 'tp2 pp4 dp8' or 'fsdp64'; empty: a usual layout."),
    ] = "",
    rollout: Annotated[
        str, typer.Option(metavar="LAYOUT", help="Rollout ranks, such as '8x tp16 ep16'; empty: a usual layout.")
    ] = "",
    wire: Annotated[
        Literal["bf16", "fp8"], typer.Option(help="Type on the wire; fp8 is sent with its scales.")
    ] = "bf16",
    relay: Annotated[
        Literal["off", "chain", "tree"], typer.Option(help="How rollout ranks relay, as with sync.relay.")
    ] = "off",
    engine: Annotated[
        str, typer.Option(help="Checkpoint engine between hosts; by default one that sends to each receiver.")
    ] = "",
    sender_gbps: SenderSpeedOption = 0.0,
    receiver_gbps: ReceiverSpeedOption = 0.0,
    links: LinksOption = 5,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of tables.")] = False,
) -> None:
    """Show the transfer plan of a large model with given layouts, from its shapes, without a run."""
    from .commands.plan import print_plan, shape_report

    report = shape_report(
        shape, trainer, rollout, wire, relay, engine, sender_gbps=sender_gbps, receiver_gbps=receiver_gbps, links=links
    )
    print_plan(report, as_json=as_json)


@app.command()
def config(path: ConfigArgument, override: SetOption = None) -> None:
    """Print the resolved configuration as TOML, with the meaning and default of every key."""
    from .config.any_config import load_any_config
    from .config.validation import explain

    typer.echo(explain(load_any_config(path, override or [])))


@app.command()
def export(
    run: Annotated[Path, typer.Argument(help="Directory of a run.", show_default=False)],
    *,
    out: Annotated[
        Path, typer.Option(metavar="DIR", help="New directory of the model; must not exist.", show_default=False)
    ],
    step: Annotated[int | None, typer.Option(help="A saved step; by default the newest.", show_default=False)] = None,
    dtype: Annotated[str, typer.Option(help="Dtype of the weights; auto is that of the initial model.")] = "auto",
) -> None:
    """Write a saved state of a run as a Hugging Face model. One process suffices for any number of trainer ranks."""
    require("export")
    from .commands.export import export_state

    typer.echo(f"step {export_state(run, step, out, dtype)} of {run} is in {out}")


@app.command()
def check(
    path: ConfigArgument,
    override: SetOption = None,
    *,
    resume: ResumeOption = False,
    on: Annotated[
        str, typer.Option(help="GPUs to predict memory and time for, such as 8xh100, which need not be here.")
    ] = "",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
) -> None:
    """Check a run without starting anything, and show the resources it needs. Exit code 2 if it cannot run."""
    require_for(command_of(read_toml(path)), path, override or [])
    from .commands.check import check_run, resource_table
    from .output import console

    needed = check_run(path.resolve(), override or [], resume=resume, on=on)
    if as_json:
        typer.echo(json.dumps(needed, indent=2))
        return
    console().print(resource_table(path.resolve(), needed, on))


@app.command()
def train(
    path: ConfigArgument, override: SetOption = None, *, resume: ResumeOption = False, plain: PlainOption = False
) -> None:
    """Run fully asynchronous RL: rollouts generate while the trainer trains, and weights are synced in the background."""
    keep_logs_off_the_terminal()
    require_for("train", path, override or [])
    import asyncio

    from .commands.train import run_training

    asyncio.run(run_training(path.resolve(), override or [], resume=resume, live=is_live(plain=plain)))


@app.command()
def scale(
    run: Annotated[Path, typer.Argument(help="Directory of a run that trains.", show_default=False)],
    *,
    replicas: Annotated[int, typer.Option(metavar="N", help="Rollout replicas to have.", min=1, show_default=False)],
    timeout_s: Annotated[
        float, typer.Option("--timeout", metavar="S", help="Most seconds to wait for them.", min=0)
    ] = 600.0,
    no_wait: Annotated[bool, typer.Option("--no-wait", help="Return as soon as the run has begun to change.")] = False,
) -> None:
    """Add rollout replicas to a run that trains, or let some leave, and wait until it has as many as asked for."""
    from .commands.scale import scale_run

    scale_run(run, replicas, timeout_s, typer.echo, wait=not no_wait)


@app.command()
def worker(
    path: ConfigArgument,
    jobs: Annotated[
        str,
        typer.Argument(help="Directory of the jobs, made if there is none, or s3://BUCKET/PREFIX.", show_default=False),
    ],
    override: SetOption = None,
    *,
    until_empty: Annotated[bool, typer.Option("--until-empty", help="End when no job waits.")] = False,
) -> None:
    """Execute the jobs that programs submit: steps, forward and backward passes, saves, exports, publications."""
    keep_logs_off_the_terminal()
    require("worker")
    import asyncio

    from .commands.worker import run_worker

    count = asyncio.run(run_worker(path.resolve(), jobs, override or [], until_empty=until_empty))
    typer.echo(f"executed {count} jobs")


@app.command()
def sft(
    path: ConfigArgument, override: SetOption = None, *, resume: ResumeOption = False, plain: PlainOption = False
) -> None:
    """Train a model on examples: prompts with completions, or conversations. There are no rollouts."""
    keep_logs_off_the_terminal()
    require("sft")
    import asyncio

    from .commands.sft import run_sft

    asyncio.run(run_sft(path.resolve(), override or [], resume=resume, live=is_live(plain=plain)))


@app.command()
def tinker(path: ConfigArgument, override: SetOption = None) -> None:
    """Train and sample for programs that speak the Tinker API: adapters of one model, for any number of clients at once."""
    keep_logs_off_the_terminal()
    require_for("tinker", path, override or [])
    import asyncio

    from .commands.tinker import run_service

    asyncio.run(run_service(path.resolve(), override or []))


@app.command()
def report(
    runs: Annotated[
        list[Path], typer.Argument(help="Directory of a run or a service; several are compared.", show_default=False)
    ],
    *,
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="By default report.html, or comparison.html, in the first directory.",
            show_default=False,
        ),
    ] = None,
    serve: Annotated[bool, typer.Option("--serve", help="Serve the page on loopback, and keep it current.")] = False,
    port: Annotated[int, typer.Option(help="With --serve: the port; 0 takes a free one.", min=0, max=65535)] = 0,
) -> None:
    """Write one self-contained HTML page about a run or a service, or one that compares several runs.

    It shows curves, time line, syncs, failures and samples.
    """
    from .output import console
    from .report.html_report import write_page
    from .report.live_report import PageServer
    from .report.run_record import read_comparison, read_live, read_record

    several = len(runs) > 1
    if serve:
        live = partial(read_comparison, runs, live=True) if several else partial(read_live, runs[0])
        live()  # an error ends the command, later ones are shown in the page
        with PageServer(live, port) as server:
            console().print(f"{server.url} follows {', '.join(map(str, runs))}; Ctrl-C ends this", markup=False)
            server.serve_forever()
    else:
        path = out or runs[0] / ("comparison.html" if several else "report.html")
        write_page(read_comparison(runs) if several else read_record(runs[0]), path)
        console().print(f"the report is {path}", markup=False)


def main() -> None:
    """Run the ``weightlane`` command."""
    end_by_sigterm()
    app()
