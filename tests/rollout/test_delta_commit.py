"""Deltas go straight into the live parameters of real vLLM, and back out of them, bit for bit."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from running_worker import Setup
from safetensors.torch import save_file
from test_rollback import PROMPT, OtherReplica
from tiny_models import greedy_tokens

from weightlane.ckpt_engines import SyncAbortedError

pytestmark = [pytest.mark.vllm, pytest.mark.slow]


def nudge(setup: Setup, version: int) -> None:
    """Change about one element in thirty of every live tensor of the trainer."""
    for tensor in setup.trainer.live.values():
        flat = tensor.view(-1)
        flat[version % 30 :: 30] *= 1.0 + 0.5 * version


def check(setup: Setup, tensors: dict[str, torch.Tensor], directory: Path) -> None:
    """The replica holds these tensors, and computes with them what transformers does."""
    setup.check_tensors(tensors)
    if not directory.exists():
        shutil.copytree(setup.models[0], directory)
        save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    assert setup.greedy(PROMPT).token_ids == greedy_tokens(directory, PROMPT, 16)


def test_deltas_are_scattered_into_live_parameters_and_taken_back_bit_for_bit(setup: Setup, tmp_path: Path) -> None:
    setup.trainer.close()
    other = OtherReplica()
    setup.new_trainer(codec="delta")
    other.join(setup)
    setup.connect(quorum=1.0, others=[other])
    setup.serve(1)
    for _ in range(2):
        nudge(setup, setup.trainer.version)
        report = setup.run(setup.trainer.sync_live())
        assert report.codec == "delta"
        assert setup.probe("probe_takes_deltas") == [True] * setup.world
        held = {name: tensor.clone() for name, tensor in setup.trainer.live.items()}
        check(setup, held, tmp_path / f"v{setup.trainer.version}")
    served = setup.trainer.version

    other.refuses = True
    nudge(setup, served)
    with pytest.raises(SyncAbortedError, match="not with me"):
        setup.run(setup.trainer.sync_live())
    assert setup.worker.version == served
    check(setup, held, tmp_path / f"v{served}")

    other.refuses = False
    nudge(setup, served + 1)
    assert setup.run(setup.trainer.sync_live()).codec == "delta", "what was taken back is a base again"
    check(setup, dict(setup.trainer.live), tmp_path / "last")
    setup.trainer.close()
    assert other.subscriber is not None
    other.subscriber.close()
    setup.new_trainer()
    setup.connect()


def test_a_delta_that_fails_on_one_rank_is_undone_on_all(setup: Setup, tmp_path: Path) -> None:
    setup.trainer.close()
    setup.new_trainer("gloo", codec="delta")
    setup.connect()
    setup.serve(2)
    held = {name: tensor.clone() for name, tensor in setup.trainer.live.items()}
    for rank in range(setup.world):
        setup.probe("probe_fail_exchange", rank, 3)
        nudge(setup, setup.trainer.version)
        with pytest.raises(SyncAbortedError, match="on purpose"):
            setup.run(setup.trainer.sync_live())
        assert setup.worker.stats().serving
        check(setup, held, tmp_path / "held")
    nudge(setup, setup.trainer.version)
    setup.run(setup.trainer.sync_live())
    check(setup, dict(setup.trainer.live), tmp_path / "last")
    setup.trainer.close()
    setup.new_trainer()
    setup.connect()
