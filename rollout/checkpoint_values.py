"""The checkpoint that a replica was started from, as a version of given tensors: read from its files when asked for."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from typing import Any, Self

import torch

from weightlane.ckpt_engines import ConfigError

from .expectation import checkpoint_files, free_in_type, stored_tensors
from .layout import SourceSpec

_PART = "model directory"


def checkpoint_specs(model: str | os.PathLike[str], dtype: torch.dtype) -> dict[str, SourceSpec]:
    """The tensors of a checkpoint as a trainer sends them to a model that computes in `dtype`, unless told otherwise.

    Raises `ConfigError` as `weightlane.rollout.expectation.expectation_of`.
    """
    stored = stored_tensors(model)
    free = free_in_type(stored)
    return {name: SourceSpec(shape, dtype if name in free else on_disk) for name, (shape, on_disk) in stored.items()}


class CheckpointValues(Mapping[str, torch.Tensor]):
    """Tensors of a checkpoint, in the types that they are wanted in. A context manager: its files are open inside.

    Args:
        model: As for `expectation_of`.
        wanted: Which tensors, in which shapes and types.
        tied: Names that are another tensor under a second name, and that tensor's.

    Raises:
        ConfigError: A file is missing or broken, or has no such tensor.
    """

    def __init__(
        self, model: str | os.PathLike[str], wanted: Mapping[str, SourceSpec], tied: Mapping[str, str]
    ) -> None:
        stored = stored_tensors(model)
        self._files = checkpoint_files(model)
        self._wanted = wanted
        self._names = {name: name if name in stored else tied.get(name, name) for name in wanted}
        if absent := sorted(set(self._names.values()) - stored.keys()):
            raise ConfigError(f"{model} has no tensor {absent[0]}.", part=_PART)
        self.converted = [name for name, spec in wanted.items() if stored[self._names[name]][1] != spec.dtype]
        """Tensors that are stored in another type than they are wanted in."""
        self._stack = ExitStack()
        self._open: dict[str, Any] = {}

    def __enter__(self) -> Self:
        from safetensors import SafetensorError, safe_open  # noqa: PLC0415 - comes with the extra `vllm`

        try:
            for file in self._files:
                opened = self._stack.enter_context(safe_open(file, framework="pt"))
                self._open |= dict.fromkeys(opened.keys(), opened)
        except (SafetensorError, OSError) as cause:
            self._stack.close()
            raise ConfigError(f"a file of it is broken: {cause}.", part=_PART) from cause
        return self

    def __exit__(self, *_: object) -> None:
        self._open.clear()
        self._stack.close()

    def __getitem__(self, name: str) -> torch.Tensor:
        stored = self._names[name]
        tensor: torch.Tensor = self._open[stored].get_tensor(stored)
        return tensor.to(self._wanted[name].dtype)

    def __iter__(self) -> Iterator[str]:
        return iter(self._wanted)

    def __len__(self) -> int:
        return len(self._wanted)
