"""`EngineConformance`: every check of the suite in one class."""

from __future__ import annotations

from .deadlines import DeadlineChecks
from .deaths import DeathChecks
from .declaration import DeclarationChecks
from .delivery import DeliveryChecks
from .reuse import ReuseChecks
from .views import ViewChecks


class EngineConformance(DeclarationChecks, DeliveryChecks, ViewChecks, DeadlineChecks, DeathChecks, ReuseChecks):
    """Derive a test class from this one and override `engine_name`, and `engine_options` where the engine needs some."""
