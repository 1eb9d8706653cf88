"""`EngineConformance` combines every check of the suite in one class."""

from __future__ import annotations

from .checks.deadlines import DeadlineChecks
from .checks.deaths import DeathChecks
from .checks.declaration import DeclarationChecks
from .checks.delivery import DeliveryChecks
from .checks.honesty import HonestyChecks
from .checks.reuse import ReuseChecks
from .checks.strangers import StrangerChecks
from .checks.views import ViewChecks


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
    """The suite. Derive a test class and override `engine_name`, and `engine_options` if the engine needs some."""
