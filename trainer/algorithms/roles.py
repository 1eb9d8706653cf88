"""The names of roles and losses that algorithms use."""

from __future__ import annotations

POLICY = "policy"
"""The model that is trained and published."""
CRITIC = "critic"
"""A model with ``trainer.head = "value"``."""
REFERENCE = "reference"
"""The policy from which the trained one shall not go far; it is not trained."""
OBJECTIVE = "objective"
"""The loss of a role, among its ``RoleSpec.losses``."""
