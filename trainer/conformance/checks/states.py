"""Checks of saved states and of exported models."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
import torch

from weightlane.ckpt_engines import ConfigError, ProtocolError, StorageError, WeightlaneError
from weightlane.sync.version.tensor_spec import kept_in_float32

from ...engines.contract import STATE_PARTS
from ..batches import BatchSpec
from ..models import VOCABULARY, make_model
from ..processes.team import Team
from ..reference import Reference, checkpoint
from .base import TeamMaker, TrainingConformanceBase, expect_equal, expect_same_change
from .steps import SMOOTH, STEP_LIMIT


class StateChecks(TrainingConformanceBase):
    """Checks of saved states and of exported models."""

    def test_a_saved_run_continues_bit_for_bit(self, team: Team, first_model: Path, tmp_path: Path) -> None:
        """It continues in the same engine, which drops a half-done step, and in a new one; so does the random state."""
        state = tmp_path / "state"
        team.setup(first_model, **SMOOTH)
        for seed in range(2):
            team.step(BatchSpec(seed))
        team.all("draw")
        team.all("save", directory=state)
        saved, drawn = team.tensors(), team.all("draw")
        norms = [team.step(BatchSpec(seed)) for seed in (2, 3)]
        trained = team.tensors()
        for where in ("the same engine", "a new engine"):
            if where == "a new engine":
                team.setup(first_model, **SMOOTH)
            team.forward_backward(BatchSpec(5, rows=3))
            team.all("draw")
            team.all("load", directory=state)
            expect_equal(team.tensors(), saved, f"the saved weights in {where}")
            assert team.all("steps") == [2] * len(team.ranks), f"expected step 2 of the saved state in {where}"
            assert team.all("draw") == drawn, f"expected the saved random state in {where}, what is drawn differs"
            again = [team.step(BatchSpec(seed)) for seed in (2, 3)]
            assert again == norms, f"expected the gradient norms {norms} in {where}, they are {again}"
            expect_equal(team.tensors(), trained, f"the weights two steps later in {where}")

    def test_training_begins_anew_with_weights(self, team: Team, first_model: Path, tmp_path: Path) -> None:
        """Loading an exported model, or a state without its optimizer, is like setting up a new engine from the export."""
        state, exported = tmp_path / "state", tmp_path / "exported"
        team.setup(first_model, **SMOOTH)
        team.step(BatchSpec(0))
        team.all("save", directory=state)
        team.all("export_hf", directory=exported)
        weights = team.tensors()
        team.setup(exported, **SMOOTH)
        norm, trained = team.step(BatchSpec(1)), team.tensors()
        for source, optimizer in ((exported, True), (state, False)):
            team.forward_backward(BatchSpec(5, rows=3))
            team.all("load", directory=source, optimizer=optimizer)
            expect_equal(team.tensors(), weights, f"the weights in {source.name}")
            assert team.all("steps") == [0] * len(team.ranks), f"expected step 0 with the weights in {source.name}"
            again = team.step(BatchSpec(1))
            assert again == norm, f"expected the gradient norm {norm} with the weights in {source.name}, it is {again}"
            expect_equal(team.tensors(), trained, f"the weights a step after those in {source.name}")

    def test_another_number_of_ranks_continues_a_saved_run(
        self, team: Team, teams: TeamMaker, first_model: Path, tmp_path: Path
    ) -> None:
        """Its weights are the saved ones bit for bit, and its next step is that of AdamW with the saved moments."""
        world = team.world
        others = [other for other in (*self.layouts.values(), {"ranks": 1}) if other.get("ranks", 1) != world]
        if not others:
            pytest.skip("the suite was given no layout with another number of ranks")
        specs, start = [BatchSpec(seed) for seed in range(3)], checkpoint(first_model)
        team.setup(first_model, **SMOOTH)
        for spec in specs[:2]:
            team.step(spec)
        team.all("save", directory=tmp_path / "state")
        saved = team.tensors()
        team.close()
        other = teams(others[0])
        other.setup(first_model, **SMOOTH)
        other.all("load", directory=tmp_path / "state")
        expect_equal(other.tensors(), saved, f"the weights that {world} ranks saved in {other.world}")
        assert other.all("steps") == [2] * other.world, "expected step 2 of the saved state"
        other.step(specs[2])
        reference = Reference(first_model)
        reference.train(specs, SMOOTH)
        what = f"the change by two steps of {world} ranks and one of {other.world}"
        expect_same_change(other.tensors(), reference.tensors(), start, STEP_LIMIT, what)

    def test_a_directory_that_exists_or_a_full_disk_fails_on_every_rank_and_leaves_nothing(
        self, team: Team, first_model: Path, tmp_path: Path
    ) -> None:
        """A limit on file sizes simulates a full disk: writes fail in the same way. Without it, both calls succeed."""
        place = tmp_path / "place"
        taken, new = place / "taken", place / "new"
        taken.mkdir(parents=True)
        team.setup(first_model)
        for op in ("save", "export_hf"):
            team.all_fail(StorageError, op, directory=taken)
            team.all("limit_files", nbytes=2000)
            team.all_fail(StorageError, op, directory=new)
            team.all("limit_files", nbytes=None)
            left = sorted(path.name for path in place.iterdir())
            assert left == ["taken"], f"expected {op} to leave nothing behind, there is {left}"
            assert not list(taken.iterdir()), f"expected {op} not to touch a directory that exists"
        team.step(BatchSpec())
        for op in ("save", "export_hf"):
            team.all(op, directory=place / op)
        left = sorted(path.name for path in place.iterdir())
        assert left == ["export_hf", "save", "taken"], f"expected two more directories, there is {left}"

    def test_a_directory_without_a_state_is_not_loaded(self, team: Team, first_model: Path, tmp_path: Path) -> None:
        """Neither is a broken model. Every rank raises a typed error, and the engine continues training."""
        team.setup(first_model)
        weights = team.tensors()
        team.all_fail(WeightlaneError, "load", directory=tmp_path / "nothing")
        (tmp_path / "config.json").write_text("{}")
        team.all_fail(WeightlaneError, "load", directory=tmp_path)
        expect_equal(team.tensors(), weights, "the weights after what could not be loaded")
        team.step(BatchSpec())

    def test_a_state_of_another_model_is_not_loaded(self, team: Team, first_model: Path, tmp_path: Path) -> None:
        """For a deeper, shallower, wider, narrower or larger model, no weight changes, and the engine continues training."""
        others = {
            "deeper": {"num_hidden_layers": 4},
            "wider": {"intermediate_size": 48},
            "larger": {"vocab_size": VOCABULARY + 6},
        }
        own, states = tmp_path / "own", {name: tmp_path / name for name in others}

        def refuse(state: Path, what: str) -> None:
            weights = team.tensors()
            team.all_fail(ConfigError, "load", directory=state)
            expect_equal(team.tensors(), weights, f"the weights of {what} after a state that does not fit")
            team.step(BatchSpec())

        team.setup(first_model)
        team.all("save", directory=own)
        for name, changes in others.items():
            team.setup(make_model(self.models[0], tmp_path / "models" / name, **changes))
            refuse(own, f"a {name} model")
            team.all("save", directory=states[name])
        team.setup(first_model)
        for name, state in states.items():
            refuse(state, f"a model whose state was of a {name} one")

    def test_state_that_is_away_comes_back_bit_for_bit(self, team: Team, first_model: Path) -> None:
        """Between two calls of a mini-batch all state is offloaded and onloaded; in between, calls that need it are refused."""
        norms, weights = [], []
        for away in (False, True):
            team.setup(first_model, **SMOOTH)
            team.step(BatchSpec(0))
            halves = BatchSpec(1, calls=((0, 1, 2),)), BatchSpec(1, calls=((3, 4, 5, 6),))
            team.forward_backward(halves[0])
            if away:
                self._move_away_and_back(team)
            team.forward_backward(halves[1])
            reports = team.all("optim_step")
            assert not any(report["error"] for report in reports), f"expected a step, it raised {reports[0]['error']}"
            norms.append(reports[0]["norm"])
            weights.append(team.tensors())
        assert norms[0] == norms[1], f"expected the same step after state was away, the gradient norms are {norms}"
        expect_equal(weights[1], weights[0], "weights after a step before which all state was away")

    def _move_away_and_back(self, team: Team) -> None:
        try:
            team.all("offload", parts=list(STATE_PARTS))
        except ConfigError as refused:
            pytest.skip(f"the engine keeps its state on its device: {refused.message}")
        team.all("offload", parts=["parameters"])  # which are offloaded already
        told = team.all("offloaded")
        assert told == [sorted(STATE_PARTS)] * len(told), f"expected all state to be away, the engine says {told}"
        batch = BatchSpec()
        team.all_fail(ProtocolError, "forward", batch=batch, outputs=["logprobs"], file="")
        team.all("onload", parts=["parameters"])
        team.all_fail(ProtocolError, "forward_backward", batch=BatchSpec(1, calls=((3, 4, 5, 6),)))
        team.all("onload", parts=list(STATE_PARTS))
        told = team.all("offloaded")
        assert told == [[]] * len(told), f"expected no state to be away, the engine says {told}"

    def test_an_exported_model_loads_in_transformers(self, team: Team, each_model: Path, tmp_path: Path) -> None:
        """Export after a step, in float32 and in bfloat16, from the engine and from a saved state in one process."""
        state = tmp_path / "state"
        team.setup(each_model, **SMOOTH)
        team.step(BatchSpec())
        team.all("save", directory=state)
        trained = team.tensors()
        for dtype in ("float32", "bfloat16"):
            directory = tmp_path / dtype
            team.all("export_hf", directory=directory, dtype=dtype)
            expect_export(directory, each_model, trained, dtype)
        arguments = {"engine": self.engine, "state": state, "model": each_model, "dtype": "bfloat16"}
        team.close()
        alone = team.ranks[0]
        team.start(alone, "export_saved", directory=tmp_path / "saved", **arguments)
        alone.result()
        expect_export(tmp_path / "saved", each_model, trained, "bfloat16")


def expect_export(directory: Path, source: Path, trained: Mapping[str, torch.Tensor], dtype: str) -> None:
    """Check that `directory` is the model of `source` with the weights `trained` in `dtype`, and a tokenizer."""
    from transformers import AutoModelForCausalLM, AutoTokenizer  # noqa: PLC0415 - an extra

    asked = getattr(torch, dtype)
    kept = kept_in_float32({name: tensor.dtype for name, tensor in checkpoint(source).items()})
    wanted = {name: tensor if name in kept else tensor.to(asked) for name, tensor in trained.items()}
    expect_equal(checkpoint(directory), wanted, f"the trained weights, exported as {dtype},")
    loaded, report = AutoModelForCausalLM.from_pretrained(directory, output_loading_info=True)
    odd = {kind: names for kind, names in report.items() if names}
    assert not odd, f"expected transformers to find exactly the model's tensors, it says {odd}"
    assert loaded.dtype == asked, f"expected a model of {dtype}, transformers loads one of {loaded.dtype}"
    words = len(AutoTokenizer.from_pretrained(directory))
    assert words == VOCABULARY, f"expected the tokenizer of {VOCABULARY} tokens, it has {words}"
