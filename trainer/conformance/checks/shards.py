"""Checks of the shards that ranks publish: names, values, coverage, and constant storage addresses."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from weightlane.ckpt_engines import ConfigError
from weightlane.sync.version.tensor_spec import dtype_name, kept_in_float32

from ..batches import BatchSpec
from ..processes.team import Team, slices
from ..reference import checkpoint
from .base import TeamMaker, TrainingConformanceBase, expect_equal


class ShardChecks(TrainingConformanceBase):
    """Checks of published shards."""

    def test_shards_are_the_checkpoint_bit_for_bit(self, team: Team, each_model: Path) -> None:
        """Names are those on disk, tied tensors are listed once, and some rank has each element; for both wire dtypes."""
        wanted = checkpoint(each_model)
        kept = kept_in_float32({name: tensor.dtype for name, tensor in wanted.items()})
        team.setup(each_model)
        for wire_dtype in ("float32", "bfloat16"):
            types = {name: "float32" if name in kept else wire_dtype for name in wanted}
            expect_equal(expect_covered(team, wire_dtype, types), wanted, "the checkpoint's tensors over all ranks")

    def test_shards_never_move(self, team: Team, first_model: Path, tmp_path: Path) -> None:
        """Storage addresses are the same after every call of the contract."""
        team.setup(first_model)

        def addresses() -> list[list[int]]:
            return [[shard["address"] for shard, _ in shards] for shards in team.shards()]

        calls: dict[str, Callable[[], Any]] = {
            "a forward pass": lambda: team.forward(BatchSpec()),
            "a step": lambda: team.step(BatchSpec()),
            "save": lambda: team.all("save", directory=tmp_path / "state"),
            "export_hf": lambda: team.all("export_hf", directory=tmp_path / "exported"),
            "load": lambda: team.all("load", directory=tmp_path / "state"),
        }
        before = addresses()
        for name, call in calls.items():
            call()
            assert addresses() == before, f"expected shards to stay where they are, they moved in {name}"

    def test_placements_are_known_before_ranks_run(
        self,
        team: Team,
        teams: TeamMaker,
        layout: Mapping[str, Any],
        each_model: Path,
    ) -> None:
        """``outline`` gives each rank's placement, in a process of its own."""
        team.setup(each_model)
        real = team.all("placement", wire_dtype="bfloat16")
        outlines = teams(layout)
        arguments = {
            "engine": self.engine,
            "trainer": outlines.trainer,
            "model": each_model,
            "wire_dtype": "bfloat16",
        }
        for number, rank in enumerate(outlines.ranks):
            outlines.start(rank, "outline", rank=number, **arguments)
        try:
            found = [rank.result() for rank in outlines.ranks]
        except ConfigError as refused:
            pytest.skip(f"the engine says no placement before it runs: {refused.message}")
        finally:
            for rank in outlines.ranks:
                rank.kill()  # torch.distributed is a fake there
        for number, (outlined, placement) in enumerate(zip(found, real, strict=True)):
            assert outlined == placement, (
                f"expected the placement of rank {number}, {placement}; outlined was {outlined}"
            )


def expect_covered(team: Team, wire_dtype: str, types: Mapping[str, str]) -> dict[str, torch.Tensor]:
    """Assemble the shards of all ranks, and check that they are complete and agree, and have these `types` on the wire."""
    held = team.shards(wire_dtype)
    full: dict[str, torch.Tensor] = {}
    known: dict[str, torch.Tensor] = {}
    order = list(dict.fromkeys(shard["name"] for shard, _ in held[0]))
    for rank, shards in zip(team.ranks, held, strict=True):
        mine: dict[str, torch.Tensor] = {}
        listed = list(dict.fromkeys(shard["name"] for shard, _ in shards))
        both = [name for name in order if name in listed], [name for name in listed if name in order]
        assert both[0] == both[1], f"expected tensors in the same order on every rank, {rank.name} has {listed}"
        for shard, data in shards:
            name, shape = shard["name"], shard["shape"]
            assert name in types, f"expected tensors of the checkpoint, {rank.name} also publishes {name}"
            assert shard["dtype"] == types[name], (
                f"expected {types[name]} on the wire for {name}, it is {shard['dtype']}"
            )
            assert dtype_name(data.dtype) == "float32", f"expected float32 weights, {name} is {data.dtype}"
            whole = full.setdefault(name, torch.zeros(shape))
            seen = known.setdefault(name, torch.zeros(shape, dtype=torch.bool))
            own = mine.setdefault(name, torch.zeros(shape, dtype=torch.bool))
            place = slices(shard, data)
            assert not own[place].any(), (
                f"expected slices that do not overlap, {rank.name} has elements of {name} twice"
            )
            again = seen[place]
            assert torch.equal(whole[place][again], data[again]), f"expected equal copies, ranks differ about {name}"
            whole[place] = data
            seen[place] = own[place] = True
    lacking = [name for name in types if name not in known or not known[name].all()]
    assert not lacking, f"expected every element from some rank, none has all of {', '.join(lacking)}"
    return full
