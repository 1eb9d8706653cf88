"""The layers that megatron-core's ``GPTModel`` is built from here."""

from .decoder import AlternatingLinear, decoder_spec

__all__ = ["AlternatingLinear", "decoder_spec"]
