"""Quantisers of the trainer's side: fewer bytes, in formats that inference engines load as their own checkpoints.

`block_fp8` makes e4m3 with a scale for each 128 x 128 block, `channel_int8` int8 with a scale for each row.

>>> import torch
>>> from weightlane.sync.codecs.quantised import block_fp8
>>> weight = torch.linspace(-2, 2, 200 * 130).view(200, 130)
>>> scales = block_fp8.scales_of(block_fp8.magnitudes(weight))
>>> quantised = block_fp8.quantise(weight, scales)
>>> quantised.dtype, tuple(scales.shape)
(torch.float8_e4m3fn, (2, 2))
>>> block_fp8.report(weight, quantised, scales).relative_rms < 0.03
True
"""

from . import block_fp8, channel_int8
from .checkpoint import DTYPES, Scheme, quantization_config, scale_name, scale_shape
from .quantisation_error import QuantisationReport
from .quantiser import QUANTISERS, Quantiser

__all__ = [
    "DTYPES",
    "QUANTISERS",
    "QuantisationReport",
    "Quantiser",
    "Scheme",
    "block_fp8",
    "channel_int8",
    "quantization_config",
    "scale_name",
    "scale_shape",
]
