"""Exit codes of the command: by them a scheduler can tell a typing error from a machine that is gone."""

from __future__ import annotations

import signal

from weightlane.ckpt_engines import (
    AddressInUseError,
    ConfigError,
    EngineUnavailableError,
    PeerLostError,
    RegistryError,
    SyncAbortedError,
    WeightlaneError,
    WorkerDiedError,
)

FAILED = 1
"""What was asked for was begun, and failed: a run, a check, a measurement."""
REFUSED = 2
"""What was typed or configured is wrong, or cannot be had here: nothing was begun. To try again changes nothing."""
PROCESS_LOST = 3
"""A process or a machine of the run is gone. To try again, with ``--resume`` if there is a saved state, may help."""
INTERRUPTED = 128 + signal.SIGINT
TERMINATED = 128 + signal.SIGTERM

_REFUSALS = (ConfigError, RegistryError, EngineUnavailableError, AddressInUseError)
_LOSSES = (WorkerDiedError, PeerLostError)


def exit_code_of(error: WeightlaneError) -> int:
    """The code for a command that ends with `error`."""
    while isinstance(error, SyncAbortedError) and error.reason is not None:
        error = error.reason
    if isinstance(error, _LOSSES):
        return PROCESS_LOST
    return REFUSED if isinstance(error, _REFUSALS) else FAILED
