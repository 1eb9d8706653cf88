"""Quantising on the trainer's side: fp8 with a scale for each 128 x 128 block, as inference engines load it from checkpoints.

>>> import torch
>>> from weightlane.sync.codecs.quantised import block_fp8
>>> weight = torch.linspace(-2, 2, 200 * 130).view(200, 130)
>>> scales = block_fp8.scales_of(block_fp8.magnitudes(weight))
>>> quantised = block_fp8.quantise(weight, scales)
>>> quantised.dtype, tuple(scales.shape)
(torch.float8_e4m3fn, (2, 2))
>>> block_fp8.error_of(weight, quantised, scales).relative_rms < 0.03
True
"""

from . import block_fp8
from .block_fp8 import QuantisationReport
from .quantisation import FP8, quantization_config, scale_name, scale_shape

__all__ = [
    "FP8",
    "QuantisationReport",
    "block_fp8",
    "quantization_config",
    "scale_name",
    "scale_shape",
]
