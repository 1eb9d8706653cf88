"""Codecs: how a version's tensors become fewer bytes. Pure functions on tensors; who sends them where stands elsewhere.

- `weightlane.sync.codecs.delta.format`: lossless, against a base version.
- `weightlane.sync.codecs.quantised`: fp8 with block scales and int8 with channel scales, in checkpoint formats that vLLM loads.
"""
