"""A version goes in the stated codec where that may be used; `auto` sends deltas below a stated share of changed elements."""

from __future__ import annotations

import dataclasses

import pytest
from hop_run import MakeRun

from weightlane.ckpt_engines import ProtocolError
from weightlane.sync.codecs.codec_choice import DELTA_BELOW, DENSE_ABOVE, CodecChooser, RankChange
from weightlane.sync.send.rank_agreement import DENSITIES, from_plain


def carried(policy: str, versions: int, full_every: int = 1000) -> list[str]:
    """The codecs of versions, of which the first has no base."""
    chooser, codecs = CodecChooser(policy, full_every), []  # type: ignore[arg-type]
    for version in range(versions):
        codecs.append(chooser.choose(has_base=version > 0).codec)
        chooser.sent(codecs[-1])
    return codecs


def test_a_stated_codec_and_the_interval_of_full_versions_are_kept() -> None:
    assert carried("delta", 10) == ["dense", *["delta"] * 9]
    for policy in ("delta", "auto"):
        assert carried(policy, 9, full_every=4) == ["dense", "delta", "delta", "delta"] * 2 + ["dense"]


def test_auto_sends_deltas_below_a_share_and_dense_above_a_higher_one_on_all_ranks_alike() -> None:
    """Also on a rank that has missed some versions. Shares are of all ranks' elements."""
    ranks = [CodecChooser("auto", 100) for _ in range(2)]
    between = (DELTA_BELOW + DENSE_ABOVE) / 2
    codecs = []
    for share in (0.5, between, DELTA_BELOW / 2, between, DENSE_ABOVE, between):
        ranks[0].note_change(round(2e6 * share), 1_000_000)  # a rank with a third of the elements has twice the share
        ranks[1].note_change(round(5e5 * share), 1_000_000)
        said = [ranks[0].change(1_000_000), ranks[1].change(2_000_000)]
        choices = [rank.by_density(said) for rank in ranks]
        assert choices[0] == choices[1]
        codecs.append(choices[0].codec)
        assert f"{share:.2%} changed" in choices[0].reason
    assert codecs == ["dense", "dense", "delta", "delta", "dense", "dense"]
    late = CodecChooser("auto", 100)
    ranks[0].by_density([RankChange(0, 1, 1, sparse=True)])
    assert late.change(1) is None
    said = [ranks[0].change(1), RankChange(round(1e6 * between), 1_000_000, 10**9, sparse=False)]
    assert late.by_density(said).codec == ranks[0].by_density(said).codec == "dense"
    assert ranks[0].by_density([*said, None]).codec == "dense"


def test_nothing_but_a_count_is_taken_from_another_rank() -> None:
    change = RankChange(3, 4, 5, sparse=True)
    assert from_plain(DENSITIES, dataclasses.asdict(change)) == change
    assert from_plain(DENSITIES, None) is None
    for said in (7, "delta", [1, 2, 3], [1, 2, 3, True, 4], [None, 2, 3, True]):
        with pytest.raises(ProtocolError, match="changed elements"):
            from_plain(DENSITIES, said)


def test_auto_learns_the_share_from_the_versions_that_it_sends(make_run: MakeRun) -> None:
    """Sampled from dense versions, counted in deltas; the ranks of a trainer agree each time."""
    run = make_run("shm", trainers=2, trainer={"codec": "auto"})
    run.publish(1)
    assert run.sync(1).codec == "dense"
    reports = [run.nudge(version, every=every) for version, every in ((2, 100), (3, 100), (4, 10), (5, 100), (6, 100))]
    assert [report.codec for report in reports] == ["dense", "delta", "delta", "dense", "delta"]
    assert "not every trainer rank knows yet" in reports[0].codec_reason
    assert "9.99% changed" in reports[3].codec_reason
