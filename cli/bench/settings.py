"""The settings of a benchmark, validated before any process starts."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from weightlane.ckpt_engines import ConfigError

_PART = "benchmark"


class BenchSettings(BaseModel):
    """Settings of a benchmark. It measures every engine with every codec and every level of integrity."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    engines: tuple[str, ...] = Field(("shm",), min_length=1, description="Names of checkpoint engines.")
    codecs: tuple[str, ...] = Field(
        ("dense",), min_length=1, description="Values of `sync.codec`, or of `sync.quantise`."
    )
    integrity: tuple[str, ...] = Field(("full",), min_length=1, description="Values of `sync.integrity`.")
    model: str = Field("tiny", description="A name of `MODELS`, or a directory of safetensors files.")
    device: Literal["cpu", "cuda"] = Field(
        "cpu", description="Device of the parameters; `devices` is the number of GPUs."
    )
    devices: int = Field(1, ge=1, le=64, description="Number of GPUs. The processes use them in turn.")
    receivers: int = Field(2, ge=1, le=64, description="Number of receiving processes.")
    density: float = Field(0.01, ge=0, le=1, description="Share of the elements that change from version to version.")
    rounds: int = Field(5, ge=1, le=1000, description="Number of measured rounds. One more round warms up.")
    step_s: float | None = Field(
        None,
        ge=0,
        le=600,
        description="Seconds between publishing and the fence; None is one and a half times the duration of the snapshot.",
    )
    loops: bool = Field(False, description="Also measure how much syncs slow down a training loop and a decode loop.")
    fit: bool = Field(
        False,
        description="Also measure parts of the model, and fit a fixed cost and a bandwidth to each row's latency.",
    )
    loop_s: float = Field(2.0, gt=0, le=600, description="Shortest duration of each of these measurements, in seconds.")
    seed: int = Field(0, ge=0, lt=2**32, description="Seed of the parameters and of their changes.")
    threads: int = Field(1, ge=1, le=1024, description="Threads of torch in every process.")
    bucket_mib: float | None = Field(None, gt=0, le=4096, description="None is the default of `sync.bucket_mib`.")
    deadline_s: float = Field(120.0, gt=0, description="Longest time of any single operation, in seconds.")
    directory: Path | None = Field(
        None, description="Directory for files of engines and limits; the system's temporary directory by default."
    )
    options: Mapping[str, Mapping[str, Any]] = Field(default_factory=dict, description="Options by engine.")

    @field_validator("engines", "codecs", "integrity")
    @classmethod
    def _different(cls, names: tuple[str, ...]) -> tuple[str, ...]:
        if len(set(names)) < len(names):
            raise ValueError("a name occurs twice")
        return names

    @classmethod
    def checked(cls, **values: Any) -> Self:
        """Make settings from a user's values. Raises a `ConfigError` that names every wrong value."""
        try:
            settings = cls(**values)
        except ValidationError as error:
            problems = "; ".join(
                f"{'.'.join(map(str, item['loc'])).replace('_', '-')}: {item['msg']} (got {item['input']!r})"
                for item in error.errors()
            )
            raise ConfigError(f"{problems}.", part=_PART, hint="See weightlane bench --help.") from None
        if stray := sorted(set(settings.options) - set(settings.engines)):
            raise ConfigError(
                f"options are given for {', '.join(stray)}, which is not measured.",
                part=_PART,
                hint="Add it to --engine.",
            )
        return settings
