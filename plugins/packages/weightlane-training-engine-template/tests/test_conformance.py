"""The conformance suite of weightlane is this engine's test-suite."""

from __future__ import annotations

from weightlane.trainer.conformance import TrainingEngineConformance


class TestTemplate(TrainingEngineConformance):
    """Every check of the suite, on this engine, however busy the machine is."""

    deadline_s = prompt_s = grace_s = 240.0
    slack_s = 25.0

    engine = "template"
