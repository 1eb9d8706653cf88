"""A checkpoint engine for NeMo-RL: weights go over any checkpoint engine of weightlane's registry.

NeMo-RL imports the class that its configuration names, on every policy worker and on every worker of vLLM::

    policy:
      generation:
        refit_transport: "weightlane_nemo_rl:WeightlaneCheckpointEngine"
        refit_cfg:
          "weightlane_nemo_rl:WeightlaneCheckpointEngine": {engine: shm}

Every argument of `WeightlaneCheckpointEngine` except `bucket_size`, which NeMo-RL gives, is a key of that section.
"""

from __future__ import annotations

from .engine import WeightlaneCheckpointEngine

__all__ = ["WeightlaneCheckpointEngine"]
