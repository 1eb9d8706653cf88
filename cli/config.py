"""The configuration of a run: a TOML file with typed keys."""

from __future__ import annotations

import difflib
import importlib.util
import json
import os
import tomllib
import types
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Union, get_args, get_origin

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic_core import PydanticUndefined

from weightlane.ckpt_engines import CheckpointEngineRegistry, ConfigError, Deadline, Delivery, WeightlaneError
from weightlane.plugins.prometheus import LOOPBACK, PROMETHEUS_TOKEN_ENV, is_loopback
from weightlane.rollout.config import AdapterConfig, RolloutConfig
from weightlane.sync import CheckpointEngineConfig, SyncConfig
from weightlane.trainer.config import (
    AlgorithmConfig,
    CriticConfig,
    DataConfig,
    ReferenceConfig,
    RewardConfig,
    TrainerConfig,
)
from weightlane.trainer.loop.config import LoopConfig

VERSIONS_DIR = "versions"
"""Directory inside the run directory for an engine that needs one and has none configured."""

_PART = "configuration"
_CHECK_S = 20.0
"""Seconds in which an engine has to find out whether it works here. Some start libraries or reach a store for it."""


class ModelSection(BaseModel):
    """The model that is trained."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    path: str = Field(
        min_length=1,
        description="Hugging Face directory of a causal language model with its tokenizer, or a model's name on the hub,"
        " such as Qwen/Qwen3-0.6B, which is read from the local cache or downloaded into it.",
    )


class RunSection(BaseModel):
    """The run's directory and seed."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    dir: Path = Field(description="Directory of the run's files; must be new, or hold a run to resume (--resume).")
    seed: int = Field(0, ge=0, description="Seed of the order of tasks and of every rank's random generators.")


class RaySection(BaseModel):
    """The Ray cluster that trainer ranks and rollout replicas run on."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    address: str = Field("", description="Address of a running Ray cluster; empty starts one on this machine.")
    start_timeout_s: float = Field(
        120.0,
        ge=30,
        description="Seconds in which a Ray on this machine has to start; at least 30, since Ray itself waits that long.",
    )


class ObserversSection(BaseModel):
    """Observers of a run beside the display and metrics.jsonl; by default none."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    trace: Path | None = Field(
        None, description="Path of a Chrome/Perfetto trace, relative to run.dir; a number is added if it exists."
    )
    trace_limit_mib: float = Field(32.0, gt=0, description="Most MiB of events that each process adds to the trace.")
    tensorboard: Path | None = Field(None, description="Directory of TensorBoard event files, relative to run.dir.")
    prometheus_port: int | None = Field(
        None, ge=0, le=65535, description="Port of an HTTP endpoint for Prometheus; 0 chooses a free one and prints it."
    )
    prometheus_host: str = Field(
        LOOPBACK,
        min_length=1,
        description=f"Address of that endpoint; if not loopback, {PROMETHEUS_TOKEN_ENV} must hold a bearer token.",
    )


class RunConfig(BaseModel):
    """The configuration of ``weightlane train``."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    run: RunSection
    model: ModelSection
    data: DataConfig
    reward: RewardConfig
    loop: LoopConfig = LoopConfig()
    algorithm: AlgorithmConfig = AlgorithmConfig()
    critic: CriticConfig = CriticConfig()
    reference: ReferenceConfig = ReferenceConfig()
    checkpoint_engine: CheckpointEngineConfig = CheckpointEngineConfig()
    sync: SyncConfig = SyncConfig()
    trainer: TrainerConfig = TrainerConfig()
    rollout: RolloutConfig = RolloutConfig()
    ray: RaySection = RaySection()
    observers: ObserversSection = ObserversSection()


def load_config(path: Path, overrides: Sequence[str] = (), *, runs_here: bool = True) -> RunConfig:
    """Read a TOML file, apply ``a.b=c`` overrides, and validate them. With `runs_here` the checkpoint engine must run here.

    Raises `ConfigError`, which names the file and line of a syntax error, or a wrong key and the nearest valid one.
    """
    try:
        raw = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"there is no configuration file {path}.", part=_PART) from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read: {error}.", part=_PART) from None
    except (ValueError, RecursionError) as error:  # also for numbers too long and brackets too deep
        raise ConfigError(f"{path} is not valid TOML: {error}.", part=_PART) from None
    for override in overrides:
        apply_setting(raw, override)
    try:
        config = RunConfig.model_validate(raw)
    except ValidationError as error:
        problems = [_describe(item) for item in error.errors()]
        raise ConfigError(" ".join(problems), part=f"{_PART} {path}") from None
    config = _with_adapter(_with_store_in_run_dir(config))
    _check_together(config, runs_here=runs_here)
    return config


def wire_dtype(config: RunConfig, computes: str) -> str:
    """Return the dtype of floating-point tensors on the wire: the configured one, or `computes`.

    `computes` is the dtype that vLLM chose to compute in. It may differ from the checkpoint's, such as bfloat16 for float32.
    """
    configured: str = config.sync.wire_dtype
    return computes if configured == "auto" else configured


def check_engine(config: RunConfig) -> None:
    """Raise `ConfigError` if the configured checkpoint engine would not work on this machine."""
    engine = config.checkpoint_engine
    try:
        CheckpointEngineRegistry().create(engine.backend, engine.options).check(Deadline.after(_CHECK_S))
    except WeightlaneError as error:
        raise ConfigError(f"checkpoint_engine {engine.backend!r} does not work here: {error}", part=_PART) from error


def _with_store_in_run_dir(config: RunConfig) -> RunConfig:
    """Give an engine that needs a directory, and has none, one in the run's directory, which every machine of a run sees."""
    engine = CheckpointEngineRegistry().engine_class(config.checkpoint_engine.backend)
    options = config.checkpoint_engine.options
    if Delivery.STORE not in engine.capabilities.delivery or "path" in options:
        return config
    field = engine.config_type.model_fields.get("path")
    if field is None or not field.is_required():
        return config
    options = {**options, "path": str(config.run.dir.resolve() / VERSIONS_DIR)}
    with_path = config.checkpoint_engine.model_copy(update={"options": options})
    return config.model_copy(update={"checkpoint_engine": with_path})


def _with_adapter(config: RunConfig) -> RunConfig:
    """Fill in ``rollout.adapter`` where versions are adapters. Raises `ConfigError` for settings that are for weights only."""
    lora, rollout = config.trainer.lora, config.rollout
    wanted = None
    if lora is not None and lora.publish == "adapter":
        wanted = AdapterConfig(rank=lora.rank, alpha=lora.alpha, targets=lora.targets)
    if rollout.adapter not in (None, wanted):
        raise ConfigError(
            "rollout.adapter is another adapter than that of trainer.lora, or trainer.lora.publish is not adapter.",
            part=_PART,
            hint="Leave rollout.adapter out: a run fills it in.",
        )
    if wanted is None:
        return config
    for refused, setting in (
        (config.sync.quantise != "none", f"sync.quantise = {config.sync.quantise}"),
        (rollout.commit == "in_place", "rollout.commit = in_place"),
        (rollout.expert_parallel, "rollout.expert_parallel"),
    ):
        if refused:
            raise ConfigError(
                f"{setting} is for versions of weights, and trainer.lora.publish is adapter.",
                part=_PART,
                hint=f'Leave out {setting.partition(" ")[0]}, or set trainer.lora.publish to "merged".',
            )
    return config.model_copy(update={"rollout": rollout.model_copy(update={"adapter": wanted})})


def _check_together(config: RunConfig, *, runs_here: bool) -> None:
    """Check values that depend on several sections, and the engine's options by the engine's own config type."""
    registry, engine = CheckpointEngineRegistry(), config.checkpoint_engine
    if config.ray.address or not runs_here:  # this machine need not have the accelerators of the cluster
        registry.validate_options(engine.backend, engine.options)
    else:
        registry.create(engine.backend, engine.options)
    _check_observers(config.observers)
    if config.algorithm.max_new_tokens >= config.rollout.max_model_len:
        raise ConfigError(
            f"rollout.max_model_len ({config.rollout.max_model_len}) is not above algorithm.max_new_tokens"
            f" ({config.algorithm.max_new_tokens}), so a prompt has no room.",
            part=_PART,
            hint="Raise rollout.max_model_len to the length of the longest prompt plus its completion.",
        )
    if config.rollout.commit == "in_place" and config.sync.quantise != "none":
        raise ConfigError(
            f"rollout.commit = in_place cannot restore weights that are sent as {config.sync.quantise} (sync.quantise).",
            part=_PART,
            hint='Set rollout.commit to "staged", or sync.quantise to "none".',
        )
    if config.rollout.concurrency < config.algorithm.group_size:
        raise ConfigError(
            f"rollout.concurrency ({config.rollout.concurrency}) is below algorithm.group_size"
            f" ({config.algorithm.group_size}).",
            part=_PART,
            hint="A replica generates whole groups. Raise rollout.concurrency.",
        )


def _check_observers(observers: ObserversSection) -> None:
    wanted = {"tensorboard": observers.tensorboard, "prometheus_port": observers.prometheus_port}
    for (key, value), library in zip(wanted.items(), ("tensorboardX", "prometheus_client"), strict=True):
        if value is not None and importlib.util.find_spec(library) is None:
            raise ConfigError(
                f"observers.{key} needs {library}, which is not installed.",
                part=_PART,
                hint="Install it with: pip install 'weightlane[observability]'.",
            )
    served = observers.prometheus_port is not None
    if served and not is_loopback(observers.prometheus_host) and not os.environ.get(PROMETHEUS_TOKEN_ENV):
        raise ConfigError(
            f"observers.prometheus_host is {observers.prometheus_host}, which other machines can reach.",
            part=_PART,
            hint=f"Set the environment variable {PROMETHEUS_TOKEN_ENV} to a token that clients must send.",
        )


def apply_setting(table: dict[str, Any], setting: str) -> None:
    """Put the value of ``key=value`` or ``a.b=value``, an argument of --set, into `table`. Raises `ConfigError`."""
    key, equals, text = setting.partition("=")
    *sections, name = key.strip().split(".")
    if not equals or not all([*sections, name]):
        raise ConfigError(f"--set {setting!r} does not have the form key=value or a.b=value.", part=_PART)
    for section in sections:
        table = table.setdefault(section, {})
        if not isinstance(table, dict):
            raise ConfigError(f"--set {setting!r}: {section} is a value, not a section.", part=_PART)
    table[name] = toml_value(text.strip())


def toml_value(text: str) -> Any:
    """Parse `text` as a TOML value (``3``, ``true``, ``[1, 2]``). Other text is a string, which thus needs no quotes."""
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except (ValueError, RecursionError):
        return text


def _describe(item: Mapping[str, Any]) -> str:
    path = ".".join(map(str, item["loc"]))
    if item["type"] == "extra_forbidden":
        section, known = _known_keys(item["loc"][:-1])
        nearest = difflib.get_close_matches(str(item["loc"][-1]), known, n=1, cutoff=0.4)
        guess = f" Did you mean {'.'.join([*section, nearest[0]])}?" if nearest else ""
        where = f"[{'.'.join(section)}]" if section else "The file"
        return f"there is no key {path}.{guess} {where} has the keys {', '.join(known)}."
    if item["type"] == "missing":
        return f"{path} is missing."
    if item["type"] == "model_type":
        _, known = _known_keys(item["loc"])
        return f"{path} must be a section with the keys {', '.join(known)} (got {item['input']!r})."
    return f"{path}: {item['msg']} (got {item['input']!r})."


def _known_keys(location: Sequence[Any]) -> tuple[list[str], list[str]]:
    model: type[BaseModel] = RunConfig
    section = []
    for name in location:
        field = model.model_fields.get(str(name))
        inner = _model_of(field.annotation) if field else None
        if inner is None:
            break
        section.append(str(name))
        model = inner
    return section, list(model.model_fields)


def _model_of(annotation: Any) -> type[BaseModel] | None:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    if get_origin(annotation) in (Union, types.UnionType):
        return next((model for arg in get_args(annotation) if (model := _model_of(arg))), None)
    return None


def explain(config: RunConfig) -> str:
    """Return `config` as TOML with the meaning and the default above every key."""
    lines: list[str] = []
    for name in RunConfig.model_fields:
        lines += _explain_section(name, getattr(config, name))
    return "\n".join(lines)


def _explain_section(path: str, section: BaseModel) -> Iterator[str]:
    yield f"# {_first_line(type(section))}"
    yield f"[{path}]"
    inner: list[tuple[str, BaseModel]] = []
    for name, field in type(section).model_fields.items():
        value = getattr(section, name)
        if isinstance(value, BaseModel):  # in TOML a table ends the keys of its parent
            inner.append((f"{path}.{name}", value))
            continue
        default = field.get_default(call_default_factory=True)
        note = "required" if default is PydanticUndefined else f"default: {_toml(default) or 'none'}"
        yield f"# {field.description} ({note})"
        text = _toml(value)
        yield f"{name} = {text}" if text else f"# {name} is not set"
    yield ""
    for inner_path, inner_section in inner:
        yield from _explain_section(inner_path, inner_section)


def _toml(value: Any) -> str:
    """Return `value` as a TOML literal; empty for None, which TOML cannot express."""
    if value is None:
        return ""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{_toml(key)} = {_toml(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(_toml(item) for item in value) + "]"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int | float):
        return repr(value)
    # A JSON string is a TOML string, except for surrogate pairs and a bare DEL.
    return json.dumps(str(value), ensure_ascii=False).replace("\x7f", "\\u007f")


def _first_line(annotation: Any) -> str:
    return (annotation.__doc__ or "").strip().splitlines()[0]
