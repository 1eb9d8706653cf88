"""``faulty:NAME``: the engine NAME with faults injected into its links on purpose, to test and soak the code that uses engines.

The wrapper has the wrapped engine's capabilities and keeps the contract: it raises typed errors, its delays end by the deadline,
and ``close`` from another thread ends an injected hang. Whether a bucket has a fault, and which, depends only on the seed, the
half's name, the session, the version and the bucket's index. A half injects at most one fault per session and version, so that
faults can be counted, and appends each to a log before it happens.
"""

from __future__ import annotations

import functools

from pydantic import Field, create_model

from ..contract.engine import CheckpointEngine
from ..links import ReceiverLink, SenderLink
from .faults import FaultyConfig, FaultyEngine
from .faulty_links import FaultyReceiverLink, FaultySenderLink

PREFIX = "faulty:"
"""Prefix of the wrapped engine's name."""


@functools.cache
def faulty(inner: type[CheckpointEngine]) -> type[FaultyEngine]:
    """Return the engine class that wraps `inner`: it has the same capabilities, and its options contain those of `inner`."""
    options = (inner.config_type, Field(description=f"Options of {inner.__name__}."))
    return type(
        f"Faulty{inner.__name__}",
        (FaultyEngine, inner),
        {
            "__doc__": f"{inner.__name__} with injected faults.",
            "config_type": create_model(f"Faulty{inner.config_type.__name__}", __base__=FaultyConfig, inner=options),
            "link_types": {SenderLink: FaultySenderLink, ReceiverLink: FaultyReceiverLink},
        },
    )
