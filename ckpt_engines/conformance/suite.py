"""`EngineConformance`: every check of the suite in one class."""

from __future__ import annotations

from .deadlines import DeadlineChecks
from .deaths import DeathChecks
from .declaration import DeclarationChecks
from .delivery import DeliveryChecks
from .honesty import HonestyChecks
from .reuse import ReuseChecks
from .strangers import StrangerChecks
from .views import ViewChecks


class EngineConformance(
    DeclarationChecks,
    HonestyChecks,
    DeliveryChecks,
    ViewChecks,
    DeadlineChecks,
    DeathChecks,
    StrangerChecks,
    ReuseChecks,
):
    """Derive a test class from this one and override `engine_name`, and `engine_options` where the engine needs some."""
