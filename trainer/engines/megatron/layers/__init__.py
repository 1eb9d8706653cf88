"""The layers that megatron-core's ``GPTModel`` is built from here."""

from .decoder import AlternatingLinear, decoder_spec
from .grouped_experts import GroupedExperts, GroupedLinear
from .router_replay import replay_routing

__all__ = ["AlternatingLinear", "GroupedExperts", "GroupedLinear", "decoder_spec", "replay_routing"]
