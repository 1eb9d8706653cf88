"""Fixtures that the suites for all kinds of engines share."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import ClassVar

import pytest
import torch


class KnownLimits:
    """A suite of which some checks may be declared to fail."""

    expected_failures: ClassVar[Mapping[str, str]] = {}
    """Names of checks that the engine cannot pass, or of one case, ``test_name[case]``, each with the reason.

    The suite fails if one of them passes.
    """

    @pytest.fixture(autouse=True)
    def _known_limit(self, request: pytest.FixtureRequest) -> None:
        name = getattr(request.node, "originalname", None) or request.node.name
        if reason := self.expected_failures.get(name) or self.expected_failures.get(request.node.name):
            request.node.add_marker(pytest.mark.xfail(reason=reason, strict=True))


class OneThread:
    """A suite in whose process torch computes on one thread: many small operations are several times slower with threads."""

    @pytest.fixture(autouse=True)
    def _one_thread(self) -> Iterator[None]:
        threads = torch.get_num_threads()
        torch.set_num_threads(1)
        yield
        torch.set_num_threads(threads)
