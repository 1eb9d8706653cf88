"""`BroadcastFolder`: prime-rl's folder of weight broadcasts as a replica that takes versions."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from weightlane.ckpt_engines import ConfigError, StorageError, UntouchedError, WeightlaneError
from weightlane.sync import CommitReport, Expectation, ExpectedTensor, Subscriber

from .layout import INDEX, check_keep, remove_step, write_step


class BroadcastFolder:
    """Takes versions as a rollout server does, and commits each as a complete broadcast for prime-rl to find.

    It runs in the process that makes it, which is trainer rank 0 for a `CollectivePublisher`, and stages a version in that host's
    memory. A version is committed when its broadcast is complete. prime-rl loads it by itself, when it looks the next time.

    Args:
        output_dir: The run's directory, prime-rl's ``output_dir``, which its processes see, too.
        model: Directory of the model that prime-rl's inference servers were started from: ``model.safetensors``, or the files
            that ``model.safetensors.index.json`` names.
        dtype: Dtype in which floating-point tensors are sent; None for that of the files, which is accepted in any case.
        keep: How many of the newest broadcasts stay, at least one.
        name: Name of this replica in reports and errors.

    Raises:
        ConfigError: There are no such files, one is broken, or `keep` is less than one.
    """

    def __init__(
        self,
        output_dir: str | Path,
        model: str | Path,
        *,
        dtype: torch.dtype | None = None,
        keep: int = 2,
        name: str = "prime-rl",
    ) -> None:
        self.name = name
        self._output_dir, self._keep = Path(output_dir), check_keep(keep)
        self._expectation = _expectation(Path(model), dtype, name)
        self._subscriber: Subscriber | None = None

    def subscriber_names(self) -> list[str]:
        """Return the name of the only subscriber."""
        return [f"{self.name}/0"]

    async def connect(self, rendezvous: Mapping[str, Any], backend: str, options: Mapping[str, Any]) -> None:
        """Subscribe to the run at `rendezvous`, leaving an earlier one."""
        self.close()
        (subscriber,) = self.subscriber_names()
        self._subscriber = await asyncio.to_thread(
            Subscriber, subscriber, rendezvous, backend, options, self._expectation
        )

    async def commit(self, version: int) -> CommitReport:
        """Write the staged `version` as the broadcast of that step.

        Raises `UntouchedError` if it cannot be written: the broadcasts are those that were there.
        """
        await asyncio.to_thread(self._write, version)
        return CommitReport(version, blocked_s=0.0)

    def _write(self, version: int) -> None:
        assert self._subscriber is not None
        tensors = self._subscriber.take(version)
        try:
            write_step(self._output_dir, version, tensors, keep=self._keep)
        except StorageError as error:
            raise UntouchedError(error.message, part=self.name, hint=error.hint) from error
        finally:
            self._subscriber.release(version)

    async def rollback(self, version: int) -> None:
        """Remove the broadcast of `version`, which too few other replicas have taken. A server that has loaded it keeps it."""
        await asyncio.to_thread(remove_step, self._output_dir, version)

    async def quarantine(self, error: WeightlaneError) -> None:
        """Do nothing: every broadcast is complete."""

    def close(self) -> None:
        """Leave the run. Idempotent."""
        if self._subscriber is not None:
            self._subscriber.close()


def _expectation(model: Path, dtype: torch.dtype | None, part: str) -> Expectation:
    """The tensors of the checkpoint in `model`, in their dtypes and in `dtype`."""
    tensors, path = {}, model / INDEX
    try:
        indexed = json.loads(path.read_text())["weight_map"].values() if path.is_file() else ["model.safetensors"]
        for path in sorted({model / each for each in indexed}):
            with safe_open(path, framework="pt") as file:
                for name in file.keys():  # noqa: SIM118 - a file is no mapping
                    tensor = file.get_tensor(name)  # a view of the mapped file
                    dtypes = {tensor.dtype, dtype or tensor.dtype} if tensor.is_floating_point() else {tensor.dtype}
                    tensors[name] = ExpectedTensor(tuple(tensor.shape), frozenset(dtypes))
    except (OSError, ValueError, KeyError, TypeError, AttributeError, SafetensorError) as error:
        hint = (
            "Give the directory of the model from which prime-rl's inference servers were started, with all its files."
        )
        raise ConfigError(f"{path} cannot be read: {type(error).__name__}: {error}.", part=part, hint=hint) from error
    return Expectation(tensors)
