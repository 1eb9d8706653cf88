"""The checks of the conformance suite, grouped by promise, and `EngineConformance`, which combines them."""

from __future__ import annotations

from .deadlines import DeadlineChecks
from .deaths import DeathChecks
from .declaration import DeclarationChecks
from .delivery import DeliveryChecks
from .reuse import ReuseChecks
from .strangers import StrangerChecks
from .views import ViewChecks


class EngineConformance(
    DeclarationChecks, DeliveryChecks, ViewChecks, DeadlineChecks, DeathChecks, StrangerChecks, ReuseChecks
):
    """The suite. Derive a test class and override `engine_name`, and `engine_options` if the engine needs some."""
