"""The settings of a benchmark, validated before any process starts."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from weightlane.ckpt_engines import ConfigError

_PART = "benchmark"


class BenchSettings(BaseModel):
    """Settings of a benchmark, which are the options of ``weightlane bench``; its help explains them.

    Every engine is measured with every codec and every level of integrity.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    engines: tuple[str, ...] = Field(("shm",), min_length=1)
    codecs: tuple[str, ...] = Field(("dense",), min_length=1)
    """Values of `sync.codec`, or of `sync.quantise`."""
    integrity: tuple[str, ...] = Field(("full",), min_length=1)
    model: str = "tiny"
    device: Literal["cpu", "cuda"] = "cpu"
    devices: int = Field(1, ge=1, le=64)
    receivers: int = Field(2, ge=1, le=64)
    density: float = Field(0.01, ge=0, le=1)
    rounds: int = Field(5, ge=1, le=1000)
    step_s: float | None = Field(None, ge=0, le=600)
    loops: bool = False
    loop_s: float = Field(2.0, gt=0, le=600)
    """Shortest duration of each measurement of `loops`, in seconds."""
    fit: bool = False
    seed: int = Field(0, ge=0, lt=2**32)
    threads: int = Field(1, ge=1, le=1024)
    bucket_mib: float | None = Field(None, gt=0, le=4096)
    deadline_s: float = Field(120.0, gt=0)
    directory: Path | None = None
    """Directory for files of engines and limits; None for the system's temporary directory."""
    options: Mapping[str, Mapping[str, Any]] = {}
    """Options by engine."""

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
