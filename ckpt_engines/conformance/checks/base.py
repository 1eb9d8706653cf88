"""The fixtures and helpers that all checks of the suite share."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, ClassVar

import pytest

from ...contract.capabilities import Capabilities
from ...errors import DeadlineExceededError, WeightlaneError
from ...registry import why_unavailable
from ...runtime.devices import is_available
from ..processes.connection import DEADLINE_S, Connection, waits_for_receivers
from ..processes.pool import GRACE_S, Pool, RemoteHalf, first_answers
from ..processes.resolve import engine_class
from .shared_fixtures import KnownLimits

MIB = 1 << 20
LARGE = 48 * MIB
"""Bytes of a bucket that does not fit into the socket buffers between two processes."""
EARLY_S = 0.1
"""Seconds by which a call may end before its deadline: clocks of two processes and libraries round differently."""
_PAUSE_S = 0.05
"""Seconds between two counts of a process's resources."""

ConnectionMaker = Callable[..., Connection]
POOL = pytest.StashKey[Pool]()
"""Key of the processes that a pytest session keeps."""


class ConformanceBase(KnownLimits):
    """Fixtures of the suite. Its user overrides `engine_name`, and `engine_options` if the engine needs some."""

    deadline_s: ClassVar[float] = DEADLINE_S
    """Deadline of calls that are expected to succeed, in seconds."""
    interrupted_s: ClassVar[float] = 2.5
    """Deadline of calls that the death of a peer interrupts, in seconds."""
    expiring_s: ClassVar[float] = 0.6
    """Deadline of calls that only the deadline ends, in seconds."""
    settle_s: ClassVar[float] = 0.15
    """Seconds after which a process that was requested to start a call is inside that call."""
    slack_s: ClassVar[float] = 2.0
    """Seconds by which a call may end after its deadline."""
    prompt_s: ClassVar[float] = 5.0
    """Seconds within which a half must notice the death of a peer, in checks that do not allow it to wait for its deadline."""
    grace_s: ClassVar[float] = GRACE_S
    """Seconds after its deadline at which a call counts as hanging and its process is killed."""
    rounds: ClassVar[int] = 50
    """Number of successive connections that must leave nothing behind."""
    most_halves: ClassVar[int | None] = None
    """Number of halves that this machine can run, e.g. its number of devices. Checks that need more are skipped."""

    @pytest.fixture
    def engine_name(self) -> str:
        """Name of the engine under test. Override it."""
        raise NotImplementedError("override the fixture engine_name")

    @pytest.fixture
    def engine_options(self) -> dict[str, Any]:
        """Options of the engine under test. Override it if the engine needs some."""
        return {}

    @pytest.fixture
    def capabilities(self, engine_name: str) -> Capabilities:
        """The engine's declared capabilities. Skips the check if the engine cannot run on this machine."""
        cls = engine_class(engine_name)
        if reason := why_unavailable(cls):
            pytest.skip(f"{engine_name} cannot run here: {reason}")
        return cls.capabilities

    @pytest.fixture
    def device(self, capabilities: Capabilities) -> str:
        """Torch device type of the checks' buckets."""
        present = [name for name in ("cpu", *sorted(capabilities.devices)) if name in capabilities.devices]
        usable = [name for name in present if is_available(name)]
        if not usable:
            pytest.skip(f"this machine has none of the declared devices: {', '.join(present)}")
        return usable[0]

    @pytest.fixture
    def pool(self, request: pytest.FixtureRequest) -> Iterator[Pool]:
        """The processes of the pytest session. After a check, the processes lent to it are taken back."""
        stash = request.config.stash
        if POOL not in stash:
            stash[POOL] = Pool()
            request.config.add_cleanup(stash[POOL].close)
        yield stash[POOL]
        stash[POOL].take_back()

    @pytest.fixture
    def halves(self, pool: Pool, engine_name: str, engine_options: dict[str, Any], device: str) -> ConnectionMaker:
        """A function that makes unconnected senders and receivers: ``halves(2)``, ``halves(2, senders=2)``."""

        def make(receivers: int, *, senders: int = 1, device: str = device) -> Connection:
            if self.most_halves is not None and receivers + senders > self.most_halves:
                pytest.skip(f"the check needs {receivers + senders} halves, this machine can run {self.most_halves}")
            return Connection(
                pool,
                engine_name,
                dict(engine_options),
                device=device,
                receivers=receivers,
                senders=senders,
                deadline_s=self.deadline_s,
                grace_s=self.grace_s,
            )

        return make

    @pytest.fixture
    def connected(self, halves: ConnectionMaker) -> ConnectionMaker:
        """A function like `halves` that also connects them."""

        def make(receivers: int, **more: Any) -> Connection:
            return halves(receivers, **more).connect()

        return make

    def failure(
        self,
        half: RemoteHalf,
        *types: type[WeightlaneError],
        names: str = "",
        between_s: tuple[float, float] = (0.0, math.inf),
    ) -> WeightlaneError:
        """Return the error of `half`'s oldest operation. It must be one of `types`, name the peer `names`, and be in time."""
        expected = f"expected {' or '.join(cls.__name__ for cls in types)} from {half.name}"
        error = half.failure(types, expected)
        said = f"it raised {type(error).__name__}"
        assert names in f"{error.peer} {error}", f"{expected} that names {names}, {said}: {error}"
        earliest_s, latest_s = between_s
        after = f"{said} after {half.seconds:.2f} s: {error}"
        assert half.seconds >= earliest_s, f"{expected}, not before its deadline, {after}"
        assert half.seconds <= latest_s, f"{expected} within {latest_s:g} s, {after}"
        return error

    def not_yet(self, half: RemoteHalf, seconds: float, event: str) -> None:
        """Check that `half`'s oldest operation does not end within `seconds`, since `event` has not happened yet."""
        assert not first_answers([half], seconds), f"expected {half.name} to wait, it returned before {event}"

    def expires(self, half: RemoteHalf, peer: RemoteHalf) -> None:
        """Check that `half`'s oldest operation ends by its deadline, `expiring_s`, with an error that names `peer`."""
        self.failure(half, DeadlineExceededError, names=peer.name, between_s=self.late(self.expiring_s))

    def late(self, deadline_s: float) -> tuple[float, float]:
        """Return the earliest and the latest time (s) at which a call may end whose deadline passes, for `failure`."""
        return deadline_s - EARLY_S, deadline_s + self.slack_s

    def in_time(self, deadline_s: float) -> tuple[float, float]:
        """Return the earliest and the latest time (s) at which a call may end that fails before its deadline, for `failure`."""
        return 0.0, deadline_s + self.slack_s

    def no_more_than(self, before: Sequence[Mapping[str, int]], connection: Connection, when: str) -> None:
        """Check that the processes hold no more resources than `before`; threads may need a moment to end."""
        names = [half.name for half in connection.halves]
        expect_no_more(
            names, before, lambda: [half.call("resources") for half in connection.halves], when, self.slack_s
        )

    @staticmethod
    def needs_waiting_sender(capabilities: Capabilities) -> None:
        """Skip the check for engines whose sender does not wait for receivers."""
        if not waits_for_receivers(capabilities):
            pytest.skip("the sender of a store does not wait for receivers")


def expect_no_more(
    names: Sequence[str],
    before: Sequence[Mapping[str, int]],
    count: Callable[[], Sequence[Mapping[str, int]]],
    when: str,
    slack_s: float,
) -> None:
    """Check that processes hold no more resources than `before` within `slack_s`, since threads may need a moment to end.

    `before` has earlier counts of the resources of each process in `names`, and `count` returns the present ones. `when`
    continues the message of a failure after "expected nothing to be left".
    """
    end = time.monotonic() + slack_s
    while True:
        found = [grown(earlier, now) for earlier, now in zip(before, count(), strict=True)]
        if not any(found) or time.monotonic() > end:
            break
        time.sleep(_PAUSE_S)
    more = [f"{name} has {text}" for name, text in zip(names, found, strict=True) if text]
    assert not more, f"expected nothing to be left {when}, {'; '.join(more)}"


def grown(before: Mapping[str, int], after: Mapping[str, int]) -> str:
    """Describe the resources of which `after` has more than `before`; empty if there are none."""
    return ", ".join(f"{after[kind]} {kind} instead of {before[kind]}" for kind in before if after[kind] > before[kind])
