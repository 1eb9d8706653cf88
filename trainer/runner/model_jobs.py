"""`ModelJobs`: makes, saves and removes what is trained from outside, an adapter or all weights, by jobs of a runner."""

from __future__ import annotations

from pathlib import Path

from ..config import LoraConfig
from .jobs import CreateAdapter, Export, Load, RemoveAdapter, Save, SaveAdapter
from .runner import Runner


class ModelJobs:
    """Runs the jobs that differ between adapters and all weights. Those of which ``adapter=None`` is said are all weights.

    Ranks hold any number of adapters, and one set of all weights: making one drops the one before.

    Args:
        runner: Executes them.
        base: The Hugging Face directory that all weights begin with, readable on every rank.
    """

    def __init__(self, runner: Runner, base: Path) -> None:
        self._runner, self._base = runner, base

    async def create(
        self, adapter: str | None, config: LoraConfig | None, source: Path | None = None, *, optimizer: bool = True
    ) -> int:
        """Make an adapter by `config`, or all weights where that is None, from what `save` wrote or first values; its steps."""
        if adapter is not None and config is not None:
            return await self._runner.run(CreateAdapter(adapter, config, source, optimizer))
        return await self._runner.run(Load(source or self._base, optimizer))

    async def save(self, adapter: str | None, directory: Path, *, optimizer: bool) -> None:
        """Write it to a directory that is not there: with its optimizer, to go on; without, as PEFT's or Hugging Face's files."""
        if adapter is not None:
            await self._runner.run(SaveAdapter(adapter, directory, optimizer))
        elif optimizer:
            await self._runner.run(Save(directory))
        else:
            await self._runner.run(Export(directory, "float32"))

    async def remove(self, adapter: str | None) -> None:
        """Free what an adapter takes on the ranks; all weights stay until others come."""
        if adapter is not None:
            await self._runner.run(RemoveAdapter(adapter))
