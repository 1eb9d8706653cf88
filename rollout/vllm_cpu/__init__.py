"""Replacements in vLLM's CPU build, for the bugs of vLLM 0.32 below. None of them is used where vLLM runs on another device.

- Linear weights are packed for a kernel, and the parameter is emptied: a copy into it changes nothing.
- Attention uses AMX registers that nothing has asked Linux for, if all linear layers are fp8: SIGILL.
- Experts are permuted and padded in place, and a reload does not repeat that: replaced weights generate garbage. The kernel
  ignores which experts a rank holds.
- With AMX the projection of keys and values is packed and its weight dropped, so that a reload fails.
- Of queries with a dimension for heads, only the first head is rotated.
- Tokens without an adapter are computed with the adapter in the last slot, since their slot is -1.

An engine without weightlane stays as it is, except that its process asks for the registers, too.
"""

from __future__ import annotations


def install() -> None:
    """Make all replacements in this process. Called once, before a model is built."""
    # Importing `experts` registers an operator with torch.
    from . import experts, layers  # noqa: PLC0415 - only in processes that run vLLM

    layers.keep_linear_parameters_live()
    layers.ask_for_amx()
    experts.keep_expert_parameters_live()
    layers.keep_latent_attention_live()
    layers.rotate_every_head()
    layers.skip_tokens_without_adapter()
