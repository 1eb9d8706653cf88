"""zstd on top: the same bytes again, or an error in words."""

from __future__ import annotations

import importlib.util
import sys

import pytest
import torch

from weightlane.ckpt_engines import ConfigError, ProtocolError
from weightlane.sync.codecs.delta import Encoded, encode
from weightlane.sync.codecs.delta.compression import compress, decompress, unavailable_reason

needs_zstd = pytest.mark.skipif(importlib.util.find_spec("zstandard") is None, reason="zstandard is not installed")


def wire() -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    old = torch.randn(100_000, generator=generator).bfloat16()
    new = torch.where(torch.rand(100_000, generator=generator) < 0.2, old * 1.01, old)
    encoded = encode(old, new)
    assert isinstance(encoded, Encoded)
    return encoded.to_bytes()


@needs_zstd
def test_a_compressed_delta_is_smaller_and_comes_back() -> None:
    delta = wire()
    small = compress(delta)
    assert small.numel() < 0.9 * delta.numel()
    assert torch.equal(decompress(small, nbytes=delta.numel()), delta)
    assert decompress(compress(delta[:0]), nbytes=0).numel() == 0


@needs_zstd
def test_damage_and_bombs_are_refused() -> None:
    delta = wire()
    small = compress(delta)
    with pytest.raises(ProtocolError, match="where 5 were announced"):
        decompress(small, nbytes=5)
    with pytest.raises(ProtocolError, match="damaged"):
        decompress(torch.zeros(40, dtype=torch.uint8), nbytes=40)
    generator = torch.Generator().manual_seed(1)
    for at in torch.randint(0, small.numel(), (50,), generator=generator).tolist():
        broken = small.clone()
        broken[at] ^= 1
        with pytest.raises(ProtocolError):
            decompress(broken, nbytes=delta.numel())
    for size in (0, 3, 20, small.numel() - 1):
        with pytest.raises(ProtocolError):
            decompress(small[:size], nbytes=delta.numel())
    with pytest.raises(ProtocolError):
        decompress(torch.cat((small, small)), nbytes=delta.numel())


def test_without_the_package_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "zstandard", None)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert "weightlane[zstd]" in (unavailable_reason() or "")
    with pytest.raises(ConfigError, match="zstandard is not installed"):
        compress(wire())
