"""The quantiser: bit for bit what a naive loop over blocks gives, for any cut into shards."""

from __future__ import annotations

import itertools

import pytest
import torch
from bits import same
from hypothesis import given
from hypothesis import strategies as st
from quantised_reference import reference_fp8, restored

from weightlane.ckpt_engines import ConfigError, ManifestError
from weightlane.sync.codecs.quantised import (
    QuantisationReport,
    block_fp8,
    quantization_config,
    scale_name,
    scale_shape,
)

SOURCES = [torch.float32, torch.bfloat16, torch.float16]
SHAPES = [(1, 1), (129, 127), (5, 400), (256, 128), (0, 5), (5, 0)]


def weights(rows: int, columns: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    """Normal values of very different magnitude by row and column, with zeros, denormals and negative zeros."""
    generator = torch.Generator().manual_seed(seed)
    matrix = torch.randn(rows, columns, generator=generator)
    matrix *= torch.logspace(-6, 2, rows)[:, None] * torch.logspace(-1, 1, columns)
    matrix[torch.rand(rows, columns, generator=generator) < 0.1] = 0.0
    matrix[torch.rand(rows, columns, generator=generator) < 0.1] = -0.0
    matrix[torch.rand(rows, columns, generator=generator) < 0.02] = 1e-42
    return matrix.to(dtype)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_what_is_quantised_and_restored_is_what_the_reference_gives(device: str) -> None:
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    for shape, dtype in itertools.product(SHAPES, SOURCES):
        matrix = weights(*shape, dtype)
        scales = block_fp8.scales_of(block_fp8.magnitudes(matrix.to(device)))
        quantised = block_fp8.quantise(matrix.to(device), scales)
        assert tuple(scales.shape) == scale_shape(shape)
        assert quantised.shape == shape
        if matrix.numel():
            expected, expected_scales = reference_fp8(matrix)
            assert same(scales.cpu(), expected_scales)
            assert same(quantised.cpu(), expected)
            assert same(block_fp8.dequantise(quantised, scales).cpu(), restored(matrix))
            narrow = torch.empty(shape, dtype=torch.bfloat16, device=device)
            block_fp8.dequantise(quantised, scales, out=narrow)
            assert same(narrow.cpu(), restored(matrix).bfloat16())


@given(st.tuples(*(st.integers(0, 300) for _ in range(2))), st.tuples(*(st.integers(1, 500) for _ in range(2))))
def test_a_device_that_takes_many_blocks_at_once_gives_the_same_bits(
    at: tuple[int, int], shape: tuple[int, int]
) -> None:
    matrix = weights(*shape, torch.bfloat16)
    found = []
    for rows in ({"cpu": 1}, {"cpu": 2}, {}):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(block_fp8, "_BLOCK_ROWS", rows)
            scales = block_fp8.scales_of(block_fp8.magnitudes(matrix, at=at))
            quantised = block_fp8.quantise(matrix, scales, at=at)
            found.append((scales, quantised, block_fp8.dequantise(quantised, scales, at=at)))
    for other in found[1:]:
        assert all(same(one, two) for one, two in zip(found[0], other, strict=True))


def test_the_error_that_quantising_makes_is_reported() -> None:
    matrix = torch.randn(256, 256, generator=torch.Generator().manual_seed(0))
    scales = block_fp8.scales_of(block_fp8.magnitudes(matrix))
    quantised = block_fp8.quantise(matrix, scales)
    found = block_fp8.error_of(matrix, quantised, scales)
    error = block_fp8.dequantise(quantised, scales) - matrix
    assert found.max_abs == error.abs().max().item()
    assert found.relative_rms == pytest.approx((error.norm() / matrix.norm()).item(), rel=1e-4)
    assert 0.02 < found.relative_rms < 0.03
    assert QuantisationReport().relative_rms == 0.0


def test_what_cannot_be_quantised_is_refused_by_name() -> None:
    for dtype, bad in itertools.product(SOURCES, (float("inf"), float("-inf"), float("nan"))):
        matrix = weights(200, 150, dtype)
        matrix[170, 149] = bad
        with pytest.raises(ManifestError, match=r"model\.w holds inf or NaN"):
            block_fp8.magnitudes(matrix, name="model.w")
    for wrong in (torch.zeros(3), torch.zeros(2, 2, 2), torch.zeros(2, 2, dtype=torch.int32)):
        with pytest.raises(ConfigError, match=r"model\.w has shape"):
            block_fp8.magnitudes(wrong, name="model.w")
        with pytest.raises(ConfigError, match=r"model\.w has shape"):
            block_fp8.quantise(wrong, torch.ones(1), name="model.w")


def test_names_and_configuration_are_those_of_the_checkpoint_format() -> None:
    assert scale_name("a.weight") == "a.weight_scale_inv"
    fp8 = quantization_config(["lm_head"])
    assert (fp8["quant_method"], fp8["weight_block_size"]) == ("fp8", [128, 128])
    assert fp8["modules_to_not_convert"] == ["lm_head"]
