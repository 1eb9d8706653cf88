"""Quantisers on the trainer's side: fewer bytes, in formats that inference engines load as their own checkpoints.

The scheme ``"fp8"`` has e4m3 elements with a scale for each 128 x 128 block (`block_fp8`), ``"int8"`` has int8 elements with a
scale for each row (`channel_int8`).

>>> import torch
>>> from weightlane.sync.codecs.quantised import QUANTISERS
>>> fp8 = QUANTISERS["fp8"]
>>> weight = torch.linspace(-2, 2, 200 * 130).view(200, 130)
>>> scales = fp8.scales_of(fp8.magnitudes(weight))
>>> quantised = fp8.quantise(weight, scales)
>>> quantised.dtype, tuple(scales.shape)
(torch.float8_e4m3fn, (2, 2))
>>> fp8.report(weight, quantised, scales).relative_rms < 0.03
True
"""

from .checkpoint import DTYPES, QUANTISERS, Scheme, quantization_config, scale_name, scale_shape
from .quantisation_error import QuantisationReport
from .quantiser import Quantiser

__all__ = [
    "DTYPES",
    "QUANTISERS",
    "QuantisationReport",
    "Quantiser",
    "Scheme",
    "quantization_config",
    "scale_name",
    "scale_shape",
]
