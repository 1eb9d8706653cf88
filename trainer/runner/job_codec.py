"""Encoding of jobs: JSON and a batch's tensors in the safetensors format. Nothing is unpickled, and no code is named."""

from __future__ import annotations

import dataclasses
import json
import struct
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any, get_type_hints

import torch
from pydantic import ConfigDict, TypeAdapter
from safetensors.torch import load, save

from weightlane.ckpt_engines import ConfigError, ProtocolError

from ..data.batch import TokenBatch, unpacked_batch
from ..data.sequences import MicroBatch
from ..data.step_result import StepResult
from ..engines.contract import BackwardAnswer, SequenceOutputs
from ..objectives.loss import OutputName
from .jobs import JOBS, Job

_PART = "job file"
_PLAIN = TypeAdapter(dict[str, Any], config=ConfigDict(ser_json_inf_nan="constants"))
_KINDS = {job.kind: job for job in JOBS}
_READ_AS: Mapping[str, Any] = {"loss": str, "outputs": tuple[OutputName, ...]}
"""Types of the fields that a file holds less of than a job may: a loss is a name, and outputs are a tuple."""
_TOKEN, _SEQUENCE = "batch.per_token.", "batch.per_sequence."


def encode_job(job: Job[Any]) -> bytes:
    """Encode a job. Raises `ConfigError` for a kind that is not in `JOBS`, a function, or settings that JSON cannot represent."""
    if type(job) not in JOBS:
        raise ConfigError(
            f"a job {job.kind!r} cannot be written to a file.", part=_PART, hint="Write its parts as jobs."
        )
    plain: dict[str, Any] = {"kind": job.kind}
    tensors: dict[str, torch.Tensor] = {}
    for field in dataclasses.fields(job):  # type: ignore[arg-type]  # every job is a dataclass
        value = getattr(job, field.name)
        if isinstance(value, TokenBatch):
            plain["sequences_per_unit"], tensors = value.sequences_per_unit, _tensors(value.packed)
        elif field.name == "loss" and not isinstance(value, str):
            raise ConfigError(
                "the loss of this job is a function, which cannot be written to a file.",
                part=_PART,
                hint="Give its name among RoleSpec.losses.",
            )
        else:
            plain[field.name] = value
    try:
        text = json.dumps(_PLAIN.dump_python(plain, mode="json"))
    except (TypeError, ValueError) as cause:
        raise ConfigError(f"a setting of this job cannot be written as JSON: {cause}.", part=_PART) from cause
    data: bytes = save(tensors, metadata={"job": text})
    return data


def decode_job(data: bytes) -> Job[Any]:
    """Decode the bytes of `encode_job`. Raises `ProtocolError` for anything else."""
    try:
        (size,) = struct.unpack_from("<Q", data)
        plain = json.loads(json.loads(data[8 : 8 + size])["__metadata__"]["job"])
        kind: str = plain.pop("kind")
        unit = plain.pop("sequences_per_unit", None)
        values = {name: _adapter(kind, name).validate_python(value, strict=False) for name, value in plain.items()}
        if unit is not None:
            values["batch"] = _batch(load(data), int(unit))
        return _KINDS[kind](**values)
    except ProtocolError as error:
        raise ProtocolError(f"its batch is damaged: {error.message}", part=_PART, hint=error.hint) from error
    except Exception as cause:  # parsers raise many types for bytes that nobody wrote
        raise ProtocolError(
            f"it is not a job, or a damaged one: {type(cause).__name__}: {str(cause).splitlines()[0] if str(cause) else ''}",
            part=_PART,
        ) from cause


def encode_result(result: Any) -> bytes:
    """Encode the result of a job of any kind: plain values, and outputs as tensors."""
    tensors: dict[str, torch.Tensor] = {}
    plain: dict[str, Any] = {"value": result}
    if isinstance(result, StepResult):
        plain = {"step": dataclasses.asdict(result)}
    elif isinstance(result, BackwardAnswer):
        plain, tensors = {"metrics": dict(result.metrics)}, _outputs(result.outputs)
    elif isinstance(result, list):
        plain, tensors = {"outputs": len(result)}, _outputs(result)
    data: bytes = save(tensors, metadata={"result": json.dumps(plain)})
    return data


def decode_result(data: bytes) -> Any:
    """Decode the bytes of `encode_result`. Raises `ProtocolError` for anything else."""
    try:
        (size,) = struct.unpack_from("<Q", data)
        plain = json.loads(json.loads(data[8 : 8 + size])["__metadata__"]["result"])
        outputs: dict[int, dict[str, torch.Tensor]] = {}
        for key, tensor in load(data).items():
            place, _, name = key.partition(".")
            outputs.setdefault(int(place), {})[name] = tensor
    except Exception as cause:  # parsers raise many types for bytes that nobody wrote
        raise ProtocolError("a result is damaged.", part=_PART) from cause
    if "step" in plain:
        return StepResult(**plain["step"])
    if "metrics" in plain:
        return BackwardAnswer(plain["metrics"], [outputs[place] for place in sorted(outputs)])
    if "outputs" in plain:
        return [outputs.get(place, {}) for place in range(plain["outputs"])]
    return plain["value"]


def _outputs(of_sequences: Sequence[SequenceOutputs]) -> dict[str, torch.Tensor]:
    return {
        f"{place}.{name}": tensor.contiguous()
        for place, outputs in enumerate(of_sequences)
        for name, tensor in outputs.items()
    }


@cache
def _adapter(kind: str, field: str) -> TypeAdapter[Any]:
    return TypeAdapter(_READ_AS.get(field) or get_type_hints(_KINDS[kind])[field])


def _tensors(packed: MicroBatch) -> dict[str, torch.Tensor]:
    return {
        "batch.tokens": packed.tokens.contiguous(),
        "batch.targets": packed.targets.contiguous(),
        "batch.offsets": packed.offsets,
        **{f"{_TOKEN}{name}": tensor.contiguous() for name, tensor in packed.per_token.items()},
        **{f"{_SEQUENCE}{name}": tensor for name, tensor in packed.per_sequence.items()},
    }


def _batch(tensors: dict[str, torch.Tensor], sequences_per_unit: int) -> TokenBatch:
    tokens, targets, offsets = (tensors[f"batch.{name}"] for name in ("tokens", "targets", "offsets"))
    whole = all(tensor.dtype == torch.int64 for tensor in (tokens, targets, offsets))
    if not whole or int(offsets[0]) or int(offsets[-1]) != len(tokens):
        raise ProtocolError("tokens, targets and offsets do not belong together.", part=_PART)

    def named(prefix: str) -> dict[str, torch.Tensor]:
        return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}

    return unpacked_batch(MicroBatch(tokens, targets, offsets, named(_TOKEN), named(_SEQUENCE), sequences_per_unit))
