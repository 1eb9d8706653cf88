"""`auto` picks the faster codec in simulated worlds of known cost, whose clock moves only when a version is carried."""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest

from weightlane.sync.codecs.codec_choice import CodecChooser

ELEMENTS, DENSE_BYTES = 1_000_000, 2_000_000
DENSITIES = (0.0, 0.0001, 0.001, 0.01, 0.05, 0.1, 0.3, 0.5, 1.0)
LEARNING = 8
"""Versions after which the codecs must be known in a new world, or at another density."""


@dataclass
class World:
    """Carries versions in the codec that the chooser picks, and knows how long each codec takes."""

    link_bytes_per_s: float
    policy: str = "auto"
    full_every: int = 1000
    per_change_s: float = 4e-6
    noise: Callable[[], float] = lambda: 1.0
    now: float = 0.0
    version: int = 0
    taken: list[str] = field(default_factory=list)
    reasons: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.chooser = CodecChooser(
            self.policy,  # type: ignore[arg-type]
            ELEMENTS,
            DENSE_BYTES,
            self.full_every,
            clock=lambda: self.now,
        )

    def dense_parts(self) -> tuple[float, float]:
        """Sending and committing: the snapshot of 20 ms is taken meanwhile."""
        return max(0.02, DENSE_BYTES / self.link_bytes_per_s), 0.02

    def delta_parts(self, density: float) -> tuple[float, float, float]:
        """Encoding, sending, committing."""
        changed = density * ELEMENTS
        return (
            0.025 + changed * self.per_change_s / 2,
            changed * 3 / self.link_bytes_per_s,
            changed * self.per_change_s / 2,
        )

    def seconds(self, codec: str, density: float) -> float:
        return sum(self.dense_parts() if codec == "dense" else self.delta_parts(density))

    def carry(self, density: float, *, has_base: bool = True, commits: bool = True, refused: bool = False) -> str:
        self.version += 1
        looked = density if self.chooser.wants_density else None
        choice = self.chooser.choose(looked, has_base=has_base and self.version > 1)
        slow = self.noise() * (4 if choice.codec not in self.taken else 1)  # memory is touched for the first time
        self.chooser.snapshot_taken(0.02 * slow)
        if choice.codec == "delta" and not refused:
            encode, send, commit = (slow * part for part in self.delta_parts(density))
            self.now += encode
            self.chooser.encoded(encode, density)
        else:
            send, commit = (slow * part for part in self.dense_parts())
        self.now += send
        self.chooser.sent(self.version, "dense" if refused else choice.codec, send)
        if commits:
            self.now += commit
            self.chooser.committed(self.version)
        self.taken.append(choice.codec)
        self.reasons.append(choice.reason)
        return choice.codec

    def run(self, density: float, versions: int) -> list[str]:
        return [self.carry(density) for _ in range(versions)]

    def best(self, density: float) -> float:
        """Seconds of the better codec that may be used."""
        may_be_delta = density < 1 / 3  # it has three bytes per change instead of two per element
        return min(self.seconds(codec, density) for codec in ("dense", *["delta"] * may_be_delta))

    def cost(self, codecs: list[str], density: float) -> float:
        """Mean seconds, as a multiple of the better codec's."""
        return statistics.fmean(self.seconds(codec, density) for codec in codecs) / self.best(density)


LINKS = pytest.mark.parametrize("link", [1e6, 1e8, 1e10])


@LINKS
def test_the_mean_over_many_versions_is_within_five_percent_of_the_better_codec(link: float) -> None:
    for density in DENSITIES:
        world = World(link)
        world.run(density, LEARNING)
        assert world.cost(world.run(density, 100), density) <= 1.05, density


@LINKS
@pytest.mark.parametrize("order", [DENSITIES, DENSITIES[::-1], (0.0, 1.0, 0.001, 0.3, 0.01, 0.1)])
def test_so_is_the_median_after_the_density_has_changed(link: float, order: tuple[float, ...]) -> None:
    world = World(link)
    world.run(order[0], LEARNING)
    for density in order:
        world.run(density, LEARNING)
        seconds = [world.seconds(codec, density) for codec in world.run(density, 30)]
        assert statistics.median(seconds) <= 1.05 * world.best(density), density


def test_one_slow_version_in_ten_changes_nothing() -> None:
    draw = random.Random(0)
    for link, better, density in ((1e6, "delta", 0.01), (1e10, "dense", 0.05)):
        world = World(link, noise=lambda: 5.0 if draw.random() < 0.1 else 1.0 + 0.1 * draw.random())
        world.run(density, LEARNING)
        assert world.run(density, 300).count(better) >= 270


def test_a_link_that_becomes_slow_or_fast_is_noticed() -> None:
    world = World(1e10)
    world.run(0.03, 30)
    assert world.taken[-1] == "dense"
    world.link_bytes_per_s = 1e6
    assert world.run(0.03, 5)[-1] == "delta"
    assert "3.00% changed: a delta is expected to take" in world.reasons[-1]
    world.link_bytes_per_s = 1e10
    assert world.run(0.03, 3000)[-5:].count("dense") >= 4, "dense was never tried again"


def test_a_delta_above_its_capacity_is_not_sent_however_slow_the_link() -> None:
    world = World(1e5)
    assert set(world.run(0.01, 30)[LEARNING:]) == {"delta"}
    assert set(world.run(0.4, 10)) == {"dense"}
    assert "too many bytes" in world.reasons[-1]
    assert world.run(0.01, 2)[-1] == "delta"


def test_a_stated_codec_and_the_interval_of_full_versions_are_kept() -> None:
    assert set(World(1e4, "dense").run(0.0, 10)) == {"dense"}
    assert World(1e11, "delta").run(0.3, 10) == ["dense", *["delta"] * 9]
    assert not World(1e4, "delta").chooser.wants_density
    every = World(1e4, "delta", full_every=4).run(0.01, 9)
    assert every == ["dense", "delta", "delta", "delta"] * 2 + ["dense"]
    auto = World(1e4, full_every=5)
    assert auto.run(0.01, 24)[-10:].count("dense") == 2
    assert auto.carry(0.01, has_base=False) == "dense"


def test_a_version_that_is_not_committed_teaches_nothing_and_refused_deltas_are_seldom_offered() -> None:
    world = World(1e6)
    for _ in range(10):
        assert world.carry(0.01, commits=False) == "dense"
    assert set(world.run(0.01, 10)[3:]) == {"delta"}
    world = World(1e6)
    offered = [world.carry(0.01, refused=True) for _ in range(203)]
    assert offered.count("delta") <= 3 + 203 // 50
    assert "had to be sent in full" in world.reasons[-1]
    assert world.run(0.01, 60)[-1] == "delta"
