"""`ModelJobs`: creates, saves and removes models, which are adapters or all weights, by jobs of a runner."""

from __future__ import annotations

from pathlib import Path

from ..config import LoraConfig
from .jobs import CreateAdapter, Export, Load, RemoveAdapter, Save, SaveAdapter
from .runner import Runner


class ModelJobs:
    """Runs the jobs that differ between adapters and all weights. ``adapter=None`` stands for all weights.

    Ranks hold any number of adapters, but one set of all weights: creating one drops the previous one.

    `base` is the Hugging Face directory with the initial values of all weights, readable on every rank.
    """

    def __init__(self, runner: Runner, base: Path) -> None:
        self._runner, self._base = runner, base

    async def create(
        self, adapter: str | None, config: LoraConfig | None, source: Path | None = None, *, optimizer: bool = True
    ) -> int:
        """Create an adapter with `config`, or all weights if that is None, from a directory of `save` or from initial values.

        Returns the optimizer steps taken.
        """
        if adapter is not None and config is not None:
            return await self._runner.run(CreateAdapter(adapter, config, source, optimizer))
        return await self._runner.run(Load(source or self._base, optimizer))

    async def save(self, adapter: str | None, directory: Path, *, optimizer: bool) -> None:
        """Write a model to a new directory: with its optimizer, to resume; without, as PEFT's or Hugging Face's files."""
        if adapter is not None:
            await self._runner.run(SaveAdapter(adapter, directory, optimizer))
        elif optimizer:
            await self._runner.run(Save(directory))
        else:
            await self._runner.run(Export(directory, "float32"))

    async def remove(self, adapter: str | None) -> None:
        """Free an adapter's memory on the ranks. All weights stay until others replace them."""
        if adapter is not None:
            await self._runner.run(RemoveAdapter(adapter))
