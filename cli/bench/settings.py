"""What a user asks of a benchmark, checked before any process starts."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from weightlane.ckpt_engines import ConfigError

_PART = "benchmark"


class BenchSettings(BaseModel):
    """Every engine is measured with every codec and every level of integrity."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    engines: tuple[str, ...] = Field(("shm",), min_length=1, description="Names of checkpoint engines.")
    codecs: tuple[str, ...] = Field(
        ("dense",), min_length=1, description="Values of `sync.codec`, or of `sync.quantise`."
    )
    integrity: tuple[str, ...] = Field(("full",), min_length=1, description="Values of `sync.integrity`.")
    model: str = Field("tiny", description="A name of `MODELS`, or a directory of safetensors files.")
    device: Literal["cpu", "cuda"] = Field(
        "cpu", description="Where the parameters of the processes lie; on the GPU, of one or of `devices`."
    )
    devices: int = Field(1, ge=1, le=64, description="GPUs, of which the processes take one each in turn.")
    receivers: int = Field(2, ge=1, le=64, description="Processes that take the weights.")
    density: float = Field(0.01, ge=0, le=1, description="Share of the elements that changes from version to version.")
    rounds: int = Field(5, ge=1, le=1000, description="How often everything is measured; one more is left out.")
    step_s: float | None = Field(
        None,
        ge=0,
        le=600,
        description="Seconds between publishing and the fence; None is one and a half times what the snapshot takes.",
    )
    loops: bool = Field(False, description="Measure, too, how much a training and a decode loop slow down.")
    loop_s: float = Field(2.0, gt=0, le=600, description="Seconds each of these measurements takes at least.")
    seed: int = Field(0, ge=0, lt=2**32, description="Of the parameters and of what changes.")
    threads: int = Field(1, ge=1, le=1024, description="Threads of torch in every process.")
    bucket_mib: float | None = Field(None, gt=0, le=4096, description="None is the default of `sync.bucket_mib`.")
    deadline_s: float = Field(120.0, gt=0, description="Longest time in seconds that any single thing may take.")
    directory: Path | None = Field(
        None, description="For what engines and limits write to files; a temporary one of the system by default."
    )
    options: Mapping[str, Mapping[str, Any]] = Field(default_factory=dict, description="Options by engine.")

    @field_validator("engines", "codecs", "integrity")
    @classmethod
    def _different(cls, names: tuple[str, ...]) -> tuple[str, ...]:
        if len(set(names)) < len(names):
            raise ValueError("names something twice")
        return names

    @classmethod
    def checked(cls, **values: Any) -> Self:
        """Settings from a user's words; `ConfigError` that names every value that will not do."""
        try:
            settings = cls(**values)
        except ValidationError as error:
            problems = "; ".join(
                f"{'.'.join(map(str, item['loc'])).replace('_', '-')}: {item['msg']} (got {item['input']!r})"
                for item in error.errors()
            )
            raise ConfigError(f"{problems}.", part=_PART, hint="See weightlane bench --help.") from None
        if stray := sorted(set(settings.options) - set(settings.engines)):
            raise ConfigError(f"options are given for {', '.join(stray)}, which is not measured.", part=_PART)
        return settings
