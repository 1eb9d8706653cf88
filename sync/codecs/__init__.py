"""Codecs: a version's tensors in fewer bytes.

- `weightlane.sync.codecs.delta.format`: the lossless codec *delta*, against a base version.
- `weightlane.sync.codecs.quantised`: fp8 with block scales and int8 with channel scales, in checkpoint formats that vLLM loads.
"""
