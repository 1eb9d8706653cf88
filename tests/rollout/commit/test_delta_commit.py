"""Deltas go straight into the live parameters of real vLLM, and back out of them, bit for bit."""

from __future__ import annotations

import pytest
import torch
from publishing import served_by
from running_replica import Setup

from weightlane.ckpt_engines import QuarantinedError, SyncAbortedError

pytestmark = [pytest.mark.vllm, pytest.mark.slow]


def live(setup: Setup) -> dict[str, torch.Tensor]:
    """Return copies of the trainer's current tensors."""
    return {name: tensor.clone() for name, tensor in setup.trainer.live.items()}


def test_deltas_are_scattered_into_live_parameters_and_taken_back_bit_for_bit(setup: Setup) -> None:
    setup.connect(codec="delta", quorum=1.0, with_another=True)
    [other] = setup.others
    setup.serve(1)
    assert setup.nudge().codec == "delta"
    assert setup.probe("probe_takes_deltas") == [True] * setup.world
    served, held = setup.trainer.version, live(setup)
    setup.check(held)

    other.before_refusal = served_by(setup.replica)
    with pytest.raises(SyncAbortedError, match="not for this replica"):
        setup.nudge()
    assert setup.replica.version == served
    setup.check(held)

    other.before_refusal = None
    assert setup.nudge().codec == "delta", "what was taken back is a base again"
    setup.check(live(setup))


def test_a_delta_that_fails_on_one_rank_is_undone_on_all_and_one_that_cannot_be_serves_nobody(setup: Setup) -> None:
    setup.connect("gloo", codec="delta")
    setup.serve(2)
    held = live(setup)
    setup.probe("probe_fail_exchange", 0, 3)
    with pytest.raises(SyncAbortedError, match="on purpose"):
        setup.nudge()
    setup.check(held)

    setup.probe("probe_fail_exchange", 1, 3, 2)
    with pytest.raises(SyncAbortedError, match=r"mixture.*on purpose") as raised:
        setup.nudge()
    assert isinstance(raised.value.reason, QuarantinedError)
    assert not setup.replica.stats().serving
    setup.nudge()
    setup.check(live(setup))
