"""``weightlane check`` shows the resources of a run, or the first error in its configuration, without starting anything."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from rich.markup import escape
from rich.table import Table

from weightlane.ckpt_engines import CheckpointEngineRegistry, ConfigError
from weightlane.rollout.contract.registry import rollout_engine_class
from weightlane.sync import Rendezvous, dtype_of
from weightlane.trainer.dispatch.role_spec import POLICY_GROUP
from weightlane.trainer.engines.hf.model_dir import ModelInfo

from ..config.run_config import ClusterConfig, ObserversSection, wire_dtype
from ..config.toml_file import command_of, read_toml
from ..run.open_observers import metrics_endpoint
from ..run.preparation import Preparation, prepare
from ..run.resources import Machines, Sizes, described, described_machines, fitted, fitted_trainer
from .prediction import ModelCost, elements_of, gpus_named, predicted
from .sft import SftPreparation, prepare_sft

_PROMPTS = 256
"""About how many prompts are counted to know their mean length."""


def check_run(path: Path, overrides: Sequence[str], *, resume: bool = False, on: str = "") -> dict[str, str]:
    """Return name and amount of every resource that the configuration at the absolute `path` needs, and what was not checked.

    `on` names other GPUs than those of this machine, as `gpus_named` takes them: memory and time are predicted for these.

    Raises the errors of the command that the configuration is for (`command_of`); with `resume`, also those of resuming. With
    ``ray.address``, the machines of the cluster are assumed to have the GPUs of this machine.
    """
    command = command_of(read_toml(path))
    if on:
        if command != "train":
            raise ConfigError(
                f"{path} is for weightlane {command}, whose memory and time are not predicted.",
                part="resources",
                hint="Leave out --on.",
            )
        return _predicted(path, overrides, on, resume=resume)
    if command == "sft":
        return _supervised(prepare_sft(path, overrides, resume=resume))
    if command == "tinker":
        return _served(path, overrides)
    if command == "worker":
        from .worker import fitted_worker, prepare_worker  # noqa: PLC0415 - needs an extra

        worker, machines = prepare_worker(path, overrides), Machines.here()
        groups = fitted_worker(worker.config, machines, counted=not worker.config.ray.address).rank_groups
        shared = ", ".join(role for role in worker.models if role not in groups)
        return {"machine": described_machines(machines)} | {
            name: f"{group.ranks} ranks x {group.gpus_per_rank:g} GPUs: {shared if name == POLICY_GROUP else name}"
            for name, group in groups.items()
        }
    ready = prepare(path, overrides, resume=resume)
    return _cluster(ready.config, ready.model) | {"training": _batches(ready)}


def _batches(ready: Preparation) -> str:
    algorithm = ready.config.algorithm
    sizes = [task.group_size or algorithm.group_size for task in ready.train_tasks]
    least, most = min(sizes), max(sizes)
    size = f"{least}" if least == most else f"{least} to {most}"
    return (
        f"{ready.config.loop.steps} batches of {algorithm.prompts_per_step} x {size} completions,"
        f" {algorithm.updates_per_batch} optimizer steps each"
    )


def _predicted(path: Path, overrides: Sequence[str], on: str, *, resume: bool) -> dict[str, str]:
    machines, gpu = gpus_named(on)
    ready = prepare(path, overrides, resume=resume, machines=machines)
    sizes = Sizes.of(ready.config, ready.model)
    config = fitted(ready.config, sizes, machines)
    some = ready.train_tasks[:: max(1, len(ready.train_tasks) // _PROMPTS)]
    prompt_tokens = sum(len(ready.tokenizer.encode(task.prompt)) for task in some) / len(some)
    from transformers import AutoConfig  # noqa: PLC0415 - optional, and slow to import

    text = AutoConfig.from_pretrained(ready.model.path).get_text_config()
    cost = ModelCost.of(text, elements_of(ready.model.path))
    return {
        **dict(described(config, sizes, machines)),
        "training": _batches(ready),
        **predicted(config, cost, ready.model.dtype, sizes, gpu, prompt_tokens),
        "not checked": "whether engines and devices work, which are not those of this machine",
    }


def _served(path: Path, overrides: Sequence[str]) -> dict[str, str]:
    from weightlane.trainer.service.http.server import listening  # noqa: PLC0415 - needs an extra

    from .tinker import prepare_service  # noqa: PLC0415 - as above

    ready = prepare_service(path, overrides)
    with listening(ready.config.service.host, ready.config.service.port):
        return _cluster(ready.config, ready.model)


def _cluster(config: ClusterConfig, model: ModelInfo) -> dict[str, str]:
    Rendezvous.host(config.sync.host, config.sync.port).close()
    _open_metrics(config.observers)
    machines, sizes, limit = Machines.here(), Sizes.of(config, model), config.rollout.staging_limit_bytes
    config = fitted(config, sizes, machines, counted=not config.ray.address)
    rows = dict(described(config, sizes, machines))
    if config.ray.address:
        return rows | {"not checked": f"{config.rollout.engine}, which runs on the machines of ray.address"}
    # May load vLLM, so it comes after all checks that don't need it.
    unknown = rollout_engine_class(config.rollout).check(config.rollout, model.path)
    if limit is not None:
        _refuse_small_staging(config, model, limit)
    return rows | ({"not checked": unknown} if unknown else {})


def _refuse_small_staging(config: ClusterConfig, model: ModelInfo, limit: int) -> None:
    """Raise `ConfigError` if a rank of a replica cannot stage any full version in `limit` bytes.

    Counts the slices that the rank will ask for, in the narrower of the two dtypes that may be sent.
    """
    facts = CheckpointEngineRegistry().engine_class(config.checkpoint_engine.backend).capabilities
    if facts.views or config.sync.quantise != "none" or config.rollout.commit == "in_place":
        return  # a version needs no staging memory, or an amount that is unknown here, or `fitted` has checked a bucket's size
    smallest = min(config.rollout.by_size.items())[1]  # whose ranks need the most
    needs = rollout_engine_class(config.rollout).planned_needs(smallest, model.path)
    width = dtype_of(wire_dtype(config, needs.dtype)).itemsize if needs.dtype else 1
    for placement in filter(None, needs.ranks):
        elements = ((spec, box.numel) for spec, box in placement.slices)
        if facts.persistent:  # ranks then receive complete tensors
            elements = ((spec, spec.numel) for spec in placement.specs)
        needed = sum(count * min(width, spec.dtype.itemsize) for spec, count in elements)
        if needed > limit:
            raise ConfigError(
                f"a rollout rank needs {needed / 2**20:.1f} MiB to stage a version, and rollout.staging_limit_bytes allows"
                f" {limit / 2**20:.1f} MiB.",
                part="resources",
                hint="Raise rollout.staging_limit_bytes, or leave it out. Or set rollout.commit to in_place, which needs one"
                " bucket.",
            )


def _supervised(ready: SftPreparation) -> dict[str, str]:
    config, machines, train = ready.config, Machines.here(), ready.train
    _open_metrics(config.observers)
    trainer = fitted_trainer(config.trainer, machines, counted=not config.ray.address)
    tokens = sum(example.sequence.length for example in train.all)
    skipped = f", {train.skipped} left out as too long" if train.skipped else ""
    return {
        "machine": described_machines(machines),
        "trainer": f"{trainer.ranks} ranks x {trainer.gpus_per_rank:g} GPUs",
        "examples": f"{len(train.all)} of {tokens} tokens{skipped}; {len(ready.heldout.all)} held out",
        "training": f"{config.sft.all_steps(len(train.all))} optimizer steps of {config.sft.batch_size} examples",
    }


def _open_metrics(observers: ObserversSection) -> None:
    """Serve metrics for a moment at the address of the run's endpoint. Raises `AddressInUseError`."""
    if observers.prometheus_port is not None:
        metrics_endpoint(observers.prometheus_port, observers.prometheus_host)[0].close()


def resource_table(path: Path, rows: Mapping[str, str], on: str = "") -> Table:
    """Return a table of the result of `check_run`."""
    found = f"on {on}, predicted" if on else "can run"
    table = Table(title=f"{escape(str(path))} {found}", title_justify="left", show_header=False)
    for name, amount in rows.items():
        table.add_row(name, escape(amount))
    return table
