"""The conformance suite for `mooncake`, with the checks that Mooncake itself is expected to fail."""

from __future__ import annotations

from typing import ClassVar

from weightlane.ckpt_engines.conformance import EngineConformance


class MooncakeConformance(EngineConformance):
    """The suite over Mooncake's TCP transport."""

    expected_failures: ClassVar[dict[str, str]] = {
        "test_nothing_listens_on_every_interface": "Mooncake 0.3.13 listens on all interfaces, whatever host says",
    }
