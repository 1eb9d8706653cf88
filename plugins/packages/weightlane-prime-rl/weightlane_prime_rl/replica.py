"""`BroadcastFolder`: prime-rl's folder of weight broadcasts as a replica that takes versions."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from weightlane.ckpt_engines import ConfigError, StorageError, UntouchedError, WeightlaneError
from weightlane.sync import CommitReport, Expectation, ExpectedTensor, Subscriber

from .layout import remove_step, write_step


class BroadcastFolder:
    """Takes versions as a rollout server does, and commits each as a complete broadcast for prime-rl to find.

    It runs in the process that makes it, which is trainer rank 0 for a `CollectivePublisher`, and stages a version in that host's
    memory. A version is committed when its broadcast is complete. prime-rl loads it by itself, when it looks the next time.

    Args:
        output_dir: The run's directory, prime-rl's ``output_dir``, which its processes see, too.
        model: Directory with the safetensors files of the model that prime-rl's inference servers were started from.
        dtype: Dtype in which floating-point tensors are sent; None for that of the files, which is accepted in any case.
        keep: How many of the newest broadcasts stay.
        name: Name of this replica in reports and errors.

    Raises:
        ConfigError: There are no such files.
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
        self._output_dir, self._keep = Path(output_dir), keep
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
    """The tensors of the safetensors files in `model`, in their dtypes and in `dtype`."""
    tensors = {}
    for path in sorted(model.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118 - a file is no mapping
                tensor = file.get_tensor(name)  # a view of the mapped file
                dtypes = {tensor.dtype, dtype or tensor.dtype} if tensor.is_floating_point() else {tensor.dtype}
                tensors[name] = ExpectedTensor(tuple(tensor.shape), frozenset(dtypes))
    if not tensors:
        raise ConfigError(
            f"{model} has no safetensors files.",
            part=part,
            hint="Give the directory of the model from which prime-rl's inference servers were started.",
        )
    return Expectation(tensors)
