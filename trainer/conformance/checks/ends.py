"""Checks of ends: ranks that die or never join, ``close``, and resources that an engine leaves behind."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from weightlane.ckpt_engines import (
    DeadlineExceededError,
    PeerLostError,
    TransportError,
    WeightlaneError,
)
from weightlane.ckpt_engines.conformance.checks.base import expect_no_more
from weightlane.ckpt_engines.conformance.processes.pool import first_answers

from ..batches import BatchSpec
from ..processes.team import Team
from .base import TeamMaker, TrainingConformanceBase


class EndChecks(TrainingConformanceBase):
    """Checks of ranks that die or never join, of ``close``, and of resources that an engine leaves behind."""

    def test_a_killed_rank_is_reported_long_before_the_timeout(self, team: Team, first_model: Path) -> None:
        """Some other rank notices at once; when the ranks that noticed close, the rest notice, too. The timeout is far longer."""
        if team.world == 1:
            pytest.skip("the layout has one rank")
        team.setup(first_model, collective_timeout_s=10 * (self.prompt_s + self.deadline_s))
        *survivors, victim = team.ranks
        victim.kill()
        for rank in survivors:
            team.start(rank, "forward_backward", batch=BatchSpec(), deadline_s=self.prompt_s)
        waiting = list(survivors)
        while waiting:
            for rank in first_answers(waiting):
                waiting.remove(rank)
                error = team.failure(rank, "forward_backward", WeightlaneError)
                assert isinstance(error, PeerLostError | TransportError), (
                    f"expected PeerLostError or TransportError from {rank.name}, it raised {type(error).__name__}: {error}"
                )
                team.start(rank, "close")
                rank.result()

    def test_a_rank_that_never_comes_is_waited_for_until_the_timeout(
        self, teams: TeamMaker, layout: Mapping[str, Any], first_model: Path
    ) -> None:
        """`setup` of the others fails with a typed error, at the timeout and no later."""
        if layout.get("ranks", 1) == 1:
            pytest.skip("the layout has one rank")
        present = teams(layout, ranks=1, deadline_s=self.missing_s + self.slack_s)
        present.start_setup(first_model, collective_timeout_s=self.missing_s)
        (rank,) = present.ranks
        present.failure(rank, "setup", (DeadlineExceededError, PeerLostError))
        latest_s = self.missing_s + self.slack_s
        assert rank.seconds <= latest_s, f"expected setup to end within {latest_s:g} s, it took {rank.seconds:.1f} s"

    def test_close_may_be_called_at_any_time_and_twice(self, team: Team, first_model: Path) -> None:
        """Close before `setup`, twice in a row after it, and between gradient and step; a new engine works afterwards."""
        arguments = {"engine": self.engine, "trainer": team.trainer}
        for number, rank in enumerate(team.ranks):
            team.start(rank, "make_and_close", rank=number, **arguments)
        for rank in team.ranks:
            rank.result()
        team.setup(first_model)
        team.forward_backward(BatchSpec())
        team.close()
        team.setup(first_model)
        team.step(BatchSpec())

    def test_a_closed_engine_leaves_nothing_behind(self, team: Team, first_model: Path) -> None:
        """No threads, processes, descriptors or ports remain from one engine to the next in the same process."""

        def live() -> None:
            team.setup(first_model)
            team.step(BatchSpec())
            team.close()

        for _ in range(2):  # afterwards, everything that is loaded once or kept for the next engine is there
            live()
        before = team.all("resources")
        live()
        names = [rank.name for rank in team.ranks]
        expect_no_more(names, before, lambda: team.all("resources"), "of a closed engine", self.slack_s)
