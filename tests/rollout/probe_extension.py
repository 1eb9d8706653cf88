"""What tests need inside a vLLM worker and its own interface does not offer: raw parameters, and failures on purpose."""

from __future__ import annotations

import itertools
import os
import time
from collections.abc import Iterator

import torch


class ProbeExtension:
    """Mixed into vLLM's worker by ``worker_extension_cls``; methods are called with ``collective_rpc``."""

    def probe_parameters(self) -> dict[str, list[object]]:
        """Every live parameter of this rank as dtype, shape and raw bytes."""
        model = self.model_runner.get_model()  # type: ignore[attr-defined]
        return {
            name: [
                str(tensor.dtype),
                list(tensor.shape),
                tensor.detach().contiguous().view(torch.uint8).numpy().tobytes(),
            ]
            for name, tensor in model.named_parameters()
        }

    def probe_process(self) -> int:
        """This rank's process id."""
        return os.getpid()

    def probe_fail_loading(self, rank: int, after: int, times: int) -> None:
        """Let the next `times` loads of one rank fail once they have put `after` tensors into the model."""
        model = self.model_runner.get_model()  # type: ignore[attr-defined]
        model.__dict__.pop("load_weights", None)
        if self.rank != rank:  # type: ignore[attr-defined]
            return
        load, failures = model.load_weights, itertools.count(1)

        def failing(weights: Iterator[tuple[str, torch.Tensor]]) -> object:
            def cut() -> Iterator[tuple[str, torch.Tensor]]:
                yield from itertools.islice(weights, after)
                raise MemoryError("out of memory, on purpose")

            if next(failures) > times:
                model.__dict__.pop("load_weights", None)
                return load(weights)
            return load(cut())

        model.load_weights = failing

    def probe_slow_loading(self, seconds: float) -> None:
        """From now on, let every load take at least so long; 0 ends that."""
        model = self.model_runner.get_model()  # type: ignore[attr-defined]
        model.__dict__.pop("load_weights", None)
        if seconds:
            load = model.load_weights

            def slow(weights: Iterator[tuple[str, torch.Tensor]]) -> object:
                time.sleep(seconds)
                return load(weights)

            model.load_weights = slow

    def probe_poison_staging(self) -> int:
        """Overwrite whatever staging memory this rank's subscriber has; returns its size in bytes."""
        staging = self.weight_transfer_engine._subscriber._staging  # type: ignore[attr-defined]
        slots: list[torch.Tensor] = [staging._incoming.data, staging._serving.data]
        for slot in slots:
            slot.fill_(0xA5)
        return sum(slot.numel() for slot in slots)
