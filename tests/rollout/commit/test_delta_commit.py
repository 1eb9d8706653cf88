"""Deltas go straight into the live parameters of real vLLM, and back out of them, bit for bit."""

from __future__ import annotations

import pytest
import torch
from publishing import served_by
from running_worker import Setup

from weightlane.ckpt_engines import QuarantinedError, SyncAbortedError

pytestmark = [pytest.mark.vllm, pytest.mark.slow]


def live(setup: Setup) -> dict[str, torch.Tensor]:
    """Return copies of the trainer's current tensors."""
    return {name: tensor.clone() for name, tensor in setup.trainer.live.items()}


def test_deltas_are_scattered_into_live_parameters_and_taken_back_bit_for_bit(setup: Setup) -> None:
    setup.connect(codec="delta", quorum=1.0, with_another=True)
    [other] = setup.others
    setup.serve(1)
    for _ in range(2):
        assert setup.nudge().codec == "delta"
        assert setup.probe("probe_takes_deltas") == [True] * setup.world
        held = live(setup)
        setup.check(held)
    served = setup.trainer.version

    other.refuses_after = served_by(setup.worker)
    with pytest.raises(SyncAbortedError, match="not with me"):
        setup.nudge()
    assert setup.worker.version == served
    setup.check(held)

    other.refuses_after = None
    assert setup.nudge().codec == "delta", "what was taken back is a base again"
    setup.check(live(setup))


def test_a_delta_that_fails_on_one_rank_is_undone_on_all(setup: Setup) -> None:
    setup.connect("gloo", codec="delta")
    setup.serve(2)
    held = live(setup)
    for rank in range(setup.world):
        setup.probe("probe_fail_exchange", rank, 3)
        with pytest.raises(SyncAbortedError, match="on purpose"):
            setup.nudge()
        setup.check(held)
    setup.nudge()
    setup.check(live(setup))


def test_a_delta_that_cannot_be_taken_back_either_serves_nobody_until_a_whole_version_commits(setup: Setup) -> None:
    setup.connect("gloo", codec="delta")
    for rank in range(setup.world):
        setup.serve(2)
        setup.probe("probe_fail_exchange", rank, 3, 2)
        with pytest.raises(SyncAbortedError, match=r"mixture.*on purpose") as raised:
            setup.nudge()
        assert isinstance(raised.value.reason, QuarantinedError)
        assert not setup.worker.stats().serving
    setup.nudge()
    setup.check(live(setup))
