"""Codecs: a version's tensors in fewer bytes.

- `weightlane.sync.codecs.delta.format`: the lossless codec *delta*, against a base version.
- `weightlane.sync.codecs.quantised`: fp8 with block scales, in the checkpoint format that vLLM loads.
"""
