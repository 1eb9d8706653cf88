"""The names of roles and losses that algorithms use."""

from __future__ import annotations

POLICY = "policy"
"""The model that is trained and published."""
CRITIC = "critic"
"""A model with ``trainer.head = "value"``."""
REFERENCE = "reference"
"""A frozen policy to which the trained policy is kept close."""
OBJECTIVE = "objective"
"""The name of a role's loss in its ``RoleSpec.losses``."""
