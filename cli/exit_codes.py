"""Exit codes of the command. A scheduler can distinguish a typing error from a lost machine by them."""

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
"""A run, a check or a measurement started and failed."""
REFUSED = 2
"""The command line or the configuration is wrong or impossible here. Nothing started, and a retry changes nothing."""
PROCESS_LOST = 3
"""A process or a machine of the run is lost. A retry may help, with ``--resume`` if there is a saved state."""
INTERRUPTED = 128 + signal.SIGINT
TERMINATED = 128 + signal.SIGTERM

_REFUSALS = (ConfigError, RegistryError, EngineUnavailableError, AddressInUseError)
_LOSSES = (WorkerDiedError, PeerLostError)


def exit_code_of(error: WeightlaneError) -> int:
    """Return the exit code of a command that ends with `error`."""
    while isinstance(error, SyncAbortedError) and error.reason is not None:
        error = error.reason
    if isinstance(error, _LOSSES):
        return PROCESS_LOST
    return REFUSED if isinstance(error, _REFUSALS) else FAILED
