"""Parts for rollout engines of other distributions, beside the contract.

`ReceivingRank` follows a publisher and stages versions, `LiveWeights` commits them and rolls them back by a `RankLoader` that the
engine writes, and `Answer` turns logits into a completion. `OneRankEngine` puts them together for an engine with one rank in the
replica's own process. The package ``weightlane-rollout-engine-template`` is an engine that is made of these parts.

>>> from weightlane.rollout import engine_toolkit as toolkit
>>> toolkit.RolloutCapabilities(summary="Generates with pen and paper.").commit_modes
frozenset({'staged'})
"""

from .commit.live_weights import LiveWeights
from .commit.one_rank_engine import OneRankEngine, RunningUpdate
from .commit.receiving_rank import ReceivingRank
from .commit.remote_failure import RemoteFailureError, quarantined, untouched
from .commit.transfer_calls import ConnectRequest, UpdateRequest
from .config import RolloutConfig
from .contract.answer import Answer
from .contract.engine import PlannedNeeds, RolloutCapabilities, RolloutEngine, UpdateFigures
from .contract.limits import limited
from .contract.loader import RankLoader
from .contract.rank_group import RankGroup
from .contract.records import Completion
from .contract.requests import GenerationRequest, Sampling, tokenizer_for_stop_strings
from .engines.transformers.model_files import read_config
from .layout.loading.checkpoint_expectation import expectation_of

__all__ = [
    "Answer",
    "Completion",
    "ConnectRequest",
    "GenerationRequest",
    "LiveWeights",
    "OneRankEngine",
    "PlannedNeeds",
    "RankGroup",
    "RankLoader",
    "ReceivingRank",
    "RemoteFailureError",
    "RolloutCapabilities",
    "RolloutConfig",
    "RolloutEngine",
    "RunningUpdate",
    "Sampling",
    "UpdateFigures",
    "UpdateRequest",
    "expectation_of",
    "limited",
    "quarantined",
    "read_config",
    "tokenizer_for_stop_strings",
    "untouched",
]
