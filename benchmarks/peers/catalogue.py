"""Every row there is, in the order of the table."""

from __future__ import annotations

from .others import OTHERS
from .plain import PLAIN
from .weightlane_peers import WEIGHTLANE

CATALOGUE = {peer.name: peer for peer in (*PLAIN, *WEIGHTLANE, *OTHERS)}
"""All rows by name."""
