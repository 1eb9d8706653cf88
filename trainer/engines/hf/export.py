"""Write a Hugging Face model directory, which appears complete or not at all; every rank writes files of its own.

No rank ever holds more than its own part of the model and one round's bytes: each file is put together bucket by bucket, from
slices that the other ranks send. torch's own writer of such files, `torch.distributed.checkpoint.HuggingFaceStorageWriter`, would
not do: every rank writes its slices under their names in memory, and rank 0 then reads all of them and writes them again, while
the others wait in one collective.
"""

from __future__ import annotations

import json
import shutil
import socket
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import zip_longest
from pathlib import Path

import torch
import torch.distributed as dist

from weightlane.ckpt_engines import ConfigError
from weightlane.sync.version.box import Box
from weightlane.sync.version.placement import Placement
from weightlane.sync.version.tensor_spec import LocalShard

from .partial_dir import PART, discard_partial, make_partial, partial_name, storage_errors
from .rank_rounds import RankRounds
from .weight_files import FILE_BYTES, Bucket, Part, WeightFile, buckets_of, plan_files

ROUND_BYTES = 256 * 2**20
"""Bytes that all ranks together write in a round. A rank holds at most this much for others, and twice its share for its own.
A round takes seconds on a slow disk, well below its deadline."""
_INDEX = "model.safetensors.index.json"
_COPIED_SUFFIXES = frozenset({".json", ".jinja", ".model", ".tiktoken", ".txt"})

ValuesOf = Callable[[LocalShard], torch.Tensor]
"""Function that returns the values of a slice, in its shape and any dtype."""


@dataclass(frozen=True, slots=True)
class ExportedModel:
    """A description of a model that is written as a Hugging Face directory."""

    model_dir: Path
    """Directory that tokenizer and configuration come from."""
    head: str
    """See ``TrainerConfig.head``."""
    dtype: torch.dtype
    """Dtype that the configuration declares."""


def export_model(
    directory: Path,
    about: ExportedModel,
    shards: Sequence[LocalShard],
    rank: int,
    device: torch.device,
    timeout_s: float,
    values_of: ValuesOf = lambda shard: shard.data,
) -> None:
    """Write the model as a Hugging Face directory, on a file system of all ranks. Collective.

    `shards` are this rank's slices, in the dtypes of the files, whose values `values_of` returns. The slowest rank may take
    `timeout_s` seconds for a round of at most `ROUND_BYTES` bytes.

    Raises:
        ConfigError: A rank does not see the directory that rank 0 made.
        StorageError: The directory exists or cannot be written.
        DeadlineExceededError: A rank, which is named, did not come in time.
        PeerLostError: A rank, which is named, is gone.
    """
    with RankRounds(rank, dist.get_world_size(), device, timeout_s, "write its part of an export") as ranks:
        _write(directory, about, shards, ranks, values_of)


def export_alone(directory: Path, about: ExportedModel, shards: Sequence[LocalShard], values_of: ValuesOf) -> None:
    """Write a model whose slices are all here, as `export_model` does, without other ranks."""
    with RankRounds.alone() as ranks:
        _write(directory, about, shards, ranks, values_of)


def _write(
    directory: Path, about: ExportedModel, shards: Sequence[LocalShard], ranks: RankRounds, values_of: ValuesOf
) -> None:
    held = {(shard.spec.name, shard.box): shard for shard in shards if shard.data.numel() or not shard.spec.numel}
    mine = Placement.of((shard.spec, shard.box) for shard in held.values())
    token = uuid.uuid4().hex
    told = ranks.begin(token, [token, socket.gethostname(), mine.to_plain()])
    (name, host, _), partial = told[0], partial_name(directory)
    mark, complete = partial / name, False
    try:
        with ranks.telling(), storage_errors("written", directory):
            if ranks.rank == 0:
                make_partial(directory)
                mark.touch()
            ranks.enter()
            _require_shared(mark, host, ranks.rank)
            placements = [Placement.from_plain(plain) for *_, plain in told]
            # Parts of a slice follow one another: its values are computed once for them.
            values = lru_cache(maxsize=1)(lambda name, box: values_of(held[name, box]))
            files = _write_files(partial, placements, ranks, values)
            complete = True
            ranks.enter()
            if ranks.rank == 0:
                _write_beside(partial, about, files)
                mark.unlink()
                partial.rename(directory)
            ranks.enter()
    except BaseException:
        # On every rank, so that nothing is left when the last one has stopped writing. But once a rank's own files are complete,
        # rank 0 may be about to rename the directory, even if this rank waited too long to see that.
        if ranks.rank == 0 or not complete:
            discard_partial(directory)
        raise


def _require_shared(mark: Path, host: str, rank: int) -> None:
    """Raise `ConfigError` unless this rank sees the file that rank 0 made on `host`."""
    if not mark.is_file():
        raise ConfigError(
            f"trainer rank {rank} on {socket.gethostname()} does not see the directory {mark.parent}, which trainer rank 0 made"
            f" on {host}: they share no file system there.",
            part=PART,
            peer=f"trainer rank {rank}",
            hint="Export to a directory of a file system that all trainer ranks share.",
        )


def _write_files(
    partial: Path, held: Sequence[Placement], ranks: RankRounds, values: Callable[[str, Box], torch.Tensor]
) -> list[WeightFile]:
    """Write this rank's files, and send to the others what they need. Returns the files of all ranks.

    `held` are the slices of each rank; `values` returns the values of one of this rank's, by tensor and box.
    """
    files = plan_files(held, FILE_BYTES)
    share = ROUND_BYTES // ranks.world
    for buckets in zip_longest(*(buckets_of(files, held, writer, share) for writer in range(ranks.world))):
        ranks.enter()
        _write_round(partial, buckets, ranks, values)
    return files


def _write_round(
    partial: Path,
    buckets: Sequence[Bucket | None],
    ranks: RankRounds,
    values: Callable[[str, Box], torch.Tensor],
) -> None:
    """Write this rank's bucket, and send to the others the parts of theirs that are here.

    `buckets` are by the rank that writes them; None for a rank that has no more.
    """

    def parts(writer: int, sender: int) -> list[Part]:
        bucket = buckets[writer]
        return [] if bucket is None else [part for part in bucket.parts if part.rank == sender]

    def held(part: Part) -> torch.Tensor:
        return values(part.spec.name, part.held)[part.box.within(part.held).index]

    own, others = ranks.rank, [rank for rank in range(ranks.world) if rank != ranks.rank]
    outgoing = {writer: _packed(sent, held) for writer in others if (sent := parts(writer, own))}
    incoming = {sender: sum(part.nbytes for part in sent) for sender in others if (sent := parts(own, sender))}
    received = ranks.swap(outgoing, incoming)
    bucket = buckets[own]
    if bucket is None:
        return
    whole = torch.empty(bucket.nbytes, dtype=torch.uint8)
    for sender in (own, *received):
        start = 0
        for part in parts(own, sender):
            at = whole[part.at : part.at + part.outer.numel * part.spec.dtype.itemsize]
            into = at.view(part.spec.dtype).view(part.outer.shape)[part.box.within(part.outer).index]
            into.copy_(held(part) if sender == own else _unpacked(received[sender], start, part))
            start += part.nbytes
    with (partial / bucket.file.name).open("ab") as file:
        if bucket.first:
            file.write(bucket.file.header)
        file.write(whole.numpy().data)


def _packed(parts: Sequence[Part], held: Callable[[Part], torch.Tensor]) -> torch.Tensor:
    """Return the values of `parts`, in the dtypes of the files, one after the other: uint8 [bytes] on the CPU."""
    message = torch.empty(sum(part.nbytes for part in parts), dtype=torch.uint8)
    start = 0
    for part in parts:
        _unpacked(message, start, part).copy_(held(part))
        start += part.nbytes
    return message


def _unpacked(message: torch.Tensor, start: int, part: Part) -> torch.Tensor:
    """Return the view of `part` in a message, from byte `start` on."""
    return message[start : start + part.nbytes].view(part.spec.dtype).view(part.box.shape)


def _write_beside(partial: Path, about: ExportedModel, files: Sequence[WeightFile]) -> None:
    """Write everything but the weights."""
    from transformers import AutoConfig  # noqa: PLC0415 - optional, and slow to import
    from transformers.models.auto.modeling_auto import (  # noqa: PLC0415 - as above
        MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES,
    )

    for path in about.model_dir.iterdir():
        if path.is_file() and path.suffix in _COPIED_SUFFIXES and not path.name.endswith(".index.json"):
            shutil.copyfile(path, partial / path.name)
    config = AutoConfig.from_pretrained(about.model_dir, local_files_only=True)
    config.dtype = about.dtype
    if about.head == "value":
        config.num_labels = 1
        config.architectures = [MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES[config.model_type]]
    elif not config.architectures:
        config.architectures = [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[config.model_type]]
    config.save_pretrained(partial)
    if len(files) > 1:
        tensors = [(spec, file.name) for file in files for spec in file.tensors]
        index = {
            "metadata": {"total_size": sum(spec.nbytes for spec, _ in tensors)},
            "weight_map": {spec.name: name for spec, name in sorted(tensors, key=lambda each: each[0].name)},
        }
        (partial / _INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
