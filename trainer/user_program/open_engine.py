"""`OpenEngine`: the training engine of one rank of a program, on the ranks that torchrun started."""

from __future__ import annotations

import os
from contextlib import AbstractContextManager
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from weightlane.ckpt_engines import ConfigError

from ..config import TrainerConfig
from ..engines.lora.program_engine import ProgramEngine
from ..engines.rank_collectives import group_backend, leave_ranks, typed_collective_errors, use_interface_towards
from ..engines.registry import training_engine_class
from .inputs import PART


class OpenEngine:
    """A training engine after its set-up. Its model's own weights are frozen unless `train_base`.

    Of `config`, engine, layout, device, precision and, to train the model's own weights, the name of the optimizer are used.
    """

    def __init__(self, model_dir: Path, config: TrainerConfig, seed: int, *, train_base: bool) -> None:
        from transformers import AutoConfig  # noqa: PLC0415 - optional

        found = training_engine_class(config.engine)
        if not issubclass(found, ProgramEngine):
            raise ConfigError(
                f"the training engine {config.engine!r} has no adapters, which slots are.",
                part=PART,
                hint="Choose trainer.engine=fsdp2 or megatron.",
            )
        if config.lora is not None or config.head != "tokens":
            named = "lora" if config.lora is not None else f"head={config.head}"
            raise ConfigError(
                f"the configuration asks for {named}.",
                part=PART,
                hint="Leave it out: a TrainerRank has slots in the place of trainer.lora, beside a model with its vocabulary.",
            )
        if config.engine == "megatron" and config.megatron.pipeline_parallel > 1:
            raise ConfigError(
                "megatron.pipeline_parallel is above 1, and no graph leads from one stage to another.",
                part=PART,
                hint="Use tensor parallelism, or the engine's own forward_backward with a loss function.",
            )
        self._joined = not dist.is_initialized()
        if self._joined:
            _join(config)
        rank, world = dist.get_rank(), dist.get_world_size()
        settings = config.model_copy(update={"ranks": world, "frozen": not train_base})
        self.engine: ProgramEngine = found(settings, rank, world, ("127.0.0.1", 0))
        try:
            found.check(settings, model_dir)
            self.engine.setup(model_dir, seed)
        except BaseException:
            self.close()
            raise
        self.hidden = int(AutoConfig.from_pretrained(model_dir).get_text_config().hidden_size)
        """Width of the head's input."""

    def collective(self) -> AbstractContextManager[None]:
        """Translate errors of collectives other than those of a pass: a lost or late peer is a typed error inside the block."""
        return typed_collective_errors("the other ranks", PART, self.engine.config.collective_timeout_s)

    def close(self) -> None:
        """Free the model, and leave the process group if this object joined it."""
        self.engine.close()
        if self._joined:
            self._joined = False
            leave_ranks()


def _join(config: TrainerConfig) -> None:
    """Join the process group that torchrun's environment variables describe; without them, a group of one rank."""
    backend = group_backend(torch.device("cpu" if config.device == "cpu" or not torch.cuda.is_available() else "cuda"))
    timeout = timedelta(seconds=config.collective_timeout_s)
    if "WORLD_SIZE" not in os.environ:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1, timeout=timeout)
        return
    use_interface_towards(os.environ.get("MASTER_ADDR", ""))
    with typed_collective_errors("the ranks that torchrun started", PART, config.collective_timeout_s):
        dist.init_process_group(backend, timeout=timeout)
