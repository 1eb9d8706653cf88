"""Placements of trainer ranks that do not run yet, from engines that are built without data.

Each rank is a forked process with a fake process group of that rank and world size, because process groups, and the state that
engines and torch keep about them, are global to a process. All ranks are children of one process that has imported everything.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch.distributed as dist

from weightlane.ckpt_engines import WeightlaneError, WorkerDiedError, as_weightlane_error, error_from_wire
from weightlane.ckpt_engines.runtime.cpus import usable_cpus
from weightlane.ckpt_engines.runtime.own_process import answer_asker, ask_process
from weightlane.sync import Placement, dtype_of

from ..config import TrainerConfig
from ..engines.contract import TrainingEngine
from ..engines.registry import training_engine_class

_PART = "trainer outline"


def outlined_placements(
    config: TrainerConfig, model_dir: Path, wire_dtype: str, *, timeout_s: float = 600.0
) -> list[Placement]:
    """Return the placement that `RankWorker.placement` will return on each rank of `config`, in rank order.

    Needs the training engine's libraries, but neither a GPU nor memory for weights. `wire_dtype` is that of floating-point
    tensors on the wire.

    Raises:
        ConfigError: The engine cannot train this model with `config`, or cannot tell its placements without running.
        DeadlineExceededError: It took longer than `timeout_s`.
        WorkerDiedError: A process ended without an answer.
    """
    plain = ask_process(
        __name__,
        # Placements do not depend on the device.
        {
            "config": config.model_copy(update={"device": "cpu"}).model_dump(mode="json"),
            "model_dir": str(model_dir.resolve()),
            "wire_dtype": wire_dtype,
        },
        part=_PART,
        what=f"what the {config.ranks} trainer ranks hold",
        timeout_s=timeout_s,
        environment={"CUDA_VISIBLE_DEVICES": ""},
    )
    return [Placement.from_plain(each) for each in plain]


def _outline_all(config: dict[str, Any], model_dir: str, wire_dtype: str) -> list[Any]:
    """`Placement.to_plain` of every rank."""
    settings = TrainerConfig.model_validate(config)
    engine_class = training_engine_class(settings.engine)
    at_once = usable_cpus()
    placements = []
    for first in range(0, settings.ranks, at_once):
        ranks = range(first, min(first + at_once, settings.ranks))
        outlines = [_start(engine_class, settings, rank, Path(model_dir), wire_dtype) for rank in ranks]
        placements += [_finish(rank, *outline) for rank, outline in zip(ranks, outlines, strict=True)]
    return placements


def _start(
    engine_class: type[TrainingEngine], config: TrainerConfig, rank: int, model_dir: Path, wire_dtype: str
) -> tuple[int, int]:
    """Fork the process of `rank`. Returns its process id, and the file descriptor from which its answer is read."""
    answers, answer = os.pipe()
    if process := os.fork():
        os.close(answer)
        return process, answers
    status = 1
    try:
        os.close(answers)
        with os.fdopen(answer, "wb") as stream:
            stream.writelines(_outline(engine_class, config, rank, model_dir, wire_dtype))
        status = 0
    finally:
        os._exit(status)  # this process must not run the exit handlers of its parent


def _outline(
    engine_class: type[TrainingEngine], config: TrainerConfig, rank: int, model_dir: Path, wire_dtype: str
) -> Iterator[bytes]:
    try:
        dist.init_process_group("fake", rank=rank, world_size=config.ranks)
        engine = engine_class(config, rank, config.ranks, ("", 0))
        engine.outline(model_dir)
        placement = Placement.of_shards(engine.local_shards(dtype_of(wire_dtype)))
        yield json.dumps({"placement": placement.to_plain()}).encode()
    except WeightlaneError as error:
        yield json.dumps({"error": error.to_wire()}).encode()
    except Exception as cause:  # noqa: BLE001 - whatever the engine raises, the user is told
        yield json.dumps({"error": as_weightlane_error(cause, f"trainer rank {rank}").to_wire()}).encode()


def _finish(rank: int, process: int, answers: int) -> Any:
    """Return the placement of a forked rank as plain data. Raises its error, or `WorkerDiedError` if it gave no answer."""
    with os.fdopen(answers, "rb") as stream:
        said = stream.read()
    _, status = os.waitpid(process, 0)
    if not said:
        raise WorkerDiedError(
            f"the process of trainer rank {rank} ended with {os.waitstatus_to_exitcode(status)}.", part=_PART
        )
    answer = json.loads(said)
    if "error" in answer:
        raise error_from_wire(answer["error"])
    return answer["placement"]


if __name__ == "__main__":
    answer_asker(_outline_all, _PART)
