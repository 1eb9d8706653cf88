"""The plan of a session with one trainer rank, one rollout rank, and one link, which a test supplies."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from weightlane.sync import Manifest
from weightlane.sync.plan.links import PlannedLink, Route
from weightlane.sync.plan.session_plan import SessionPlan
from weightlane.sync.receive.receive_session import ReceiveSession

SENDER, RECEIVER = "trainer-0", "rollout-0/0"


def receive_session(layout: Manifest, link: Any, name: str = "s") -> ReceiveSession:
    """Return the receiving end of a session in which `link` brings versions of `layout`."""
    planned = PlannedLink(0, (SENDER,), (RECEIVER,), {SENDER: (0,)})
    plan = SessionPlan(layout, (Route(((SENDER, RECEIVER),)),), [planned])
    links: Any = SimpleNamespace(receivers={0: link}, senders={})
    return ReceiveSession(name, RECEIVER, plan, links)
