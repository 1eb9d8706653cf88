"""Every row there is, in the order of the table."""

from __future__ import annotations

from .file_peers import FILES
from .gloo_peers import GLOO
from .limits import LIMITS
from .peer import Peer
from .ray_peers import RAY
from .torchstore_peer import TORCHSTORE
from .transfer_peers import TRANSFERS
from .verl_peers import VERL


def catalogue() -> dict[str, Peer]:
    """All rows by name. Those of weightlane are there where weightlane can be imported."""
    rows = [*LIMITS, *_weightlane(), *GLOO, *FILES, *TRANSFERS, *RAY, *TORCHSTORE, *VERL]
    return {peer.name: peer for peer in rows}


def _weightlane() -> tuple[Peer, ...]:
    try:
        from .weightlane_peers import WEIGHTLANE
    except ModuleNotFoundError:
        return ()
    return WEIGHTLANE
