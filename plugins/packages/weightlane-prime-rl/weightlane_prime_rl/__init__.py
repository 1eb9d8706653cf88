"""Versions of weightlane as prime-rl's weight broadcasts: folders ``broadcasts/step_<n>``, complete once they have ``STABLE``.

In a training script of one's own, a folder takes the place of a rollout server::

    from weightlane.sync import CollectivePublisher
    from weightlane_prime_rl import BroadcastFolder

    folder = BroadcastFolder("outputs/my-run", "models/my-model", dtype=torch.bfloat16)
    with CollectivePublisher(shards_of(model, torch.bfloat16), [folder], backend="shm") as weights:
        ...
        weights.publish(step)  # makes outputs/my-run/broadcasts/step_<step>

`write_step` writes one such folder from tensors.
"""

from __future__ import annotations

from .layout import write_step
from .replica import BroadcastFolder

__all__ = ["BroadcastFolder", "write_step"]
