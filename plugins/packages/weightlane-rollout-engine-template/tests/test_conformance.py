"""The conformance suite of weightlane is this engine's test-suite."""

from __future__ import annotations

from weightlane.rollout.conformance import RolloutEngineConformance


class TestTemplate(RolloutEngineConformance):
    """Every check of the suite, on this engine, however busy the machine is."""

    deadline_s = 240.0
    slack_s = 25.0

    engine = "template"
