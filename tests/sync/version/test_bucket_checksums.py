"""No changed byte, and no bucket in the place of another, passes its checksum."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from waiting import HANG_S

from weightlane.ckpt_engines import CorruptBucketError, Deadline, DeadlineExceededError, ProtocolError
from weightlane.ckpt_engines.runtime.tensor_bytes import mixed_sum, xxh3
from weightlane.sync.control.rendezvous import Rendezvous
from weightlane.sync.version.bucket_checksums import StoredChecksums, checksum_of, verify


@pytest.mark.parametrize("checksum", [mixed_sum, xxh3])
@given(st.integers(0, 20_000), st.data())
def test_a_checksum_sees_changed_bits_anywhere_swapped_words_shifted_blocks_and_more_zeros(
    checksum, size: int, data: st.DataObject
) -> None:  # type: ignore[no-untyped-def]
    payload = torch.randint(0, 256, (size,), dtype=torch.uint8, generator=torch.Generator().manual_seed(size))
    before = checksum(payload)
    assert checksum(payload.clone()) == before
    assert checksum(torch.zeros(size, dtype=torch.uint8)) != checksum(torch.zeros(size + 8, dtype=torch.uint8))
    if size:
        changed = payload.clone()
        places = data.draw(st.sets(st.integers(0, 8 * size - 1), min_size=1, max_size=8))
        for place in places:
            changed[place // 8] ^= 1 << place % 8
        assert checksum(changed) != before
    if size >= 16:
        words = size // 8
        i, j = data.draw(st.integers(0, words - 1)), data.draw(st.integers(0, words - 1))
        swapped = payload.clone()
        view = swapped[: words * 8].view(torch.int64)
        view[[i, j]] = view[[j, i]]
        assert (checksum(swapped) == before) == bool(torch.equal(swapped, payload))
        low, high = sorted((i, j))
        shifted = payload.clone()
        shifted[8 * low : 8 * high + 8] = shifted[8 * low : 8 * high + 8].roll(data.draw(st.sampled_from([1, 2, 8])))
        assert (checksum(shifted) == before) == bool(torch.equal(shifted, payload))
        start = data.draw(st.integers(0, 7))  # memory that does not begin with a word
        assert checksum(torch.cat([payload[:start], payload])[start:]) == before


def test_a_checksum_sees_the_signs_of_two_numbers_that_are_flipped() -> None:
    """Which are the highest bits of words, where every fourth bf16 has its sign: all pairs of some words, equal or not."""
    drawn = torch.randn(32, generator=torch.Generator().manual_seed(0))
    for payload in (torch.ones(32).bfloat16(), torch.ones(32), drawn.bfloat16(), drawn):
        before = mixed_sum(payload.view(torch.uint8))
        for i, j in itertools.combinations(range(32), 2):
            flipped = payload.clone()
            flipped[[i, j]] *= -1
            assert mixed_sum(flipped.view(torch.uint8)) != before, (i, j)


@pytest.mark.parametrize("make", [checksum_of, lambda data: f"mixed:{mixed_sum(data)}"])
def test_a_damaged_bucket_and_what_is_no_checksum_are_refused_and_the_sender_named(make) -> None:  # type: ignore[no-untyped-def]
    data = torch.arange(256, dtype=torch.int64).view(torch.uint8)
    checksum = make(data)
    verify(data, checksum, 3, 1, peer="trainer-0")
    with pytest.raises(CorruptBucketError, match="no valid checksum"):
        verify(data, "md5:00", 3, 1, peer="trainer-0")
    data[5] ^= 0x10
    with pytest.raises(CorruptBucketError, match="bucket 1 of version 3 arrived with changed bytes") as caught:
        verify(data, checksum, 3, 1, peer="trainer-0")
    assert caught.value.peer == "trainer-0"


def test_checksums_of_stored_versions_are_one_message_and_those_of_older_versions_go() -> None:
    host = Rendezvous.host()
    sender, receiver = (StoredChecksums(host.mailbox("checksums/s-1")) for _ in range(2))
    for version in (1, 2):
        sender.put(version, [f"xxh3:{version}{index}" for index in range(3)])
    assert receiver.get(2, 3, Deadline.after(HANG_S)) == ["xxh3:20", "xxh3:21", "xxh3:22"]
    with pytest.raises(DeadlineExceededError):
        receiver.get(1, 3, Deadline.after(0.05))
    for wrong, says in (("xxh3:30", "valid list"), ([None], "valid string"), (["xxh3:30"] * 2, "2 checksums of 1")):
        host.mailbox("checksums/s-1").put("3", wrong)
        with pytest.raises(ProtocolError, match=says):
            receiver.get(3, 1, Deadline.after(HANG_S))
