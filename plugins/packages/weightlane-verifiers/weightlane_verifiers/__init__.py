"""Environments of verifiers as agents of a run: ``environment.options.function = "weightlane_verifiers:play"``.

``python -m weightlane_verifiers tasks`` writes the tasks of an environment for it.
"""

from .chat import Chat
from .playing import play

# verifiers looks here for the harness "weightlane_verifiers": it is the one that is a verifiers.v1.Harness.
__all__ = ["Chat", "play"]
