"""A version goes in the stated codec where that may be used; `auto` finds the faster one in a simulated world of known costs."""

from __future__ import annotations

import statistics
from dataclasses import dataclass, field

import pytest

from weightlane.sync.codecs.codec_choice import CodecChooser

ELEMENTS, DENSE_BYTES = 1_000_000, 2_000_000
LEARNING = 8
"""Versions after which `auto` must know the costs of both codecs."""


@dataclass
class World:
    """Carries versions in the chosen codec. Its clock moves by the time that the codec takes, and by nothing else."""

    link_bytes_per_s: float
    policy: str = "auto"
    full_every: int = 1000
    now: float = 0.0
    version: int = 0
    reasons: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        limits = ELEMENTS, DENSE_BYTES, self.full_every
        self.chooser = CodecChooser(self.policy, *limits, clock=lambda: self.now)  # type: ignore[arg-type]

    def parts(self, codec: str, density: float) -> tuple[float, float, float]:
        """Seconds of encoding, sending and committing. A dense version is sent while its snapshot of 20 ms is taken."""
        if codec == "dense":
            return 0.0, max(0.02, DENSE_BYTES / self.link_bytes_per_s), 0.02
        changed = density * ELEMENTS
        return 0.025 + changed * 2e-6, changed * 3 / self.link_bytes_per_s, changed * 2e-6

    def carry(self, density: float, *, has_base: bool = True, commits: bool = True) -> str:
        self.version += 1
        looked = density if self.chooser.wants_density else None
        choice = self.chooser.choose(looked, has_base=has_base and self.version > 1)
        encode, send, commit = self.parts(choice.codec, density)
        self.chooser.snapshot_taken(0.02)
        if choice.codec == "delta":
            self.now += encode
            self.chooser.encoded(encode, density)
        self.now += send
        self.chooser.sent(self.version, choice.codec, send)
        if commits:
            self.now += commit
            self.chooser.committed(self.version)
        self.reasons.append(choice.reason)
        return choice.codec

    def run(self, density: float, versions: int) -> list[str]:
        return [self.carry(density) for _ in range(versions)]

    def cost(self, codecs: list[str], density: float) -> float:
        """Mean seconds of `codecs`, as a multiple of the seconds of the better codec that may be used."""
        may_be_delta = density < 1 / 3  # it has three bytes per change instead of two per element
        seconds = {codec: sum(self.parts(codec, density)) for codec in ("dense", "delta")}
        best = min(seconds.values()) if may_be_delta else seconds["dense"]
        return statistics.fmean(seconds[codec] for codec in codecs) / best


@pytest.mark.parametrize("link", [1e6, 1e8, 1e10])
def test_auto_is_within_five_percent_of_the_better_codec(link: float) -> None:
    for density in (0.0, 0.001, 0.01, 0.1, 0.5, 1.0):
        world = World(link)
        world.run(density, LEARNING)
        assert world.cost(world.run(density, 100), density) <= 1.05, density


def test_a_link_that_becomes_slow_and_versions_that_are_not_committed_are_reckoned_with() -> None:
    world = World(1e10)
    assert {world.carry(0.03, commits=False) for _ in range(10)} == {"dense"}, "what was not committed was measured"
    assert world.run(0.03, 30)[-1] == "dense"
    world.link_bytes_per_s = 1e6
    assert world.run(0.03, 5)[-1] == "delta"
    assert "3.00% changed: a delta is expected to take" in world.reasons[-1]
    assert set(world.run(0.4, 10)) == {"dense"}
    assert "too many bytes" in world.reasons[-1]


def test_a_stated_codec_and_the_interval_of_full_versions_are_kept() -> None:
    assert set(World(1e4, "dense").run(0.0, 10)) == {"dense"}
    assert World(1e11, "delta").run(0.3, 10) == ["dense", *["delta"] * 9]
    every = World(1e4, "delta", full_every=4).run(0.01, 9)
    assert every == ["dense", "delta", "delta", "delta"] * 2 + ["dense"]
    auto = World(1e4, full_every=5)
    assert auto.run(0.01, 24)[-10:].count("dense") == 2
    assert auto.carry(0.01, has_base=False) == "dense"
