"""``help()`` of the contract's data classes explains their fields, whose docstrings Python itself drops."""

from __future__ import annotations

import dataclasses
import inspect
import pydoc
import re

import pytest

import weightlane.ckpt_engines as public
from weightlane.ckpt_engines.contract.field_docs import document_fields

CLASSES = [
    cls
    for cls in (getattr(public, name) for name in public.__all__)
    if isinstance(cls, type) and dataclasses.is_dataclass(cls) and ".contract." in cls.__module__
]


def attributes(cls: type) -> dict[str, str]:
    """The section about fields in what ``help(cls)`` prints."""
    text = pydoc.plain(pydoc.render_doc(cls)).replace(" |  ", "")
    section = text.partition("Attributes:\n")[2].partition("\n\n")[0]
    return dict(re.findall(r"^ +(\w+): (.+)$", section, re.MULTILINE))


def test_help_explains_every_field_and_every_way_of_delivery() -> None:
    assert {public.Bucket, public.Capabilities, public.Topology} <= set(CLASSES)
    for cls in (*CLASSES, public.EngineListing):
        explained = attributes(cls)
        assert [field.name for field in dataclasses.fields(cls) if field.name not in explained] == [], cls
    assert "cpu" in attributes(public.Capabilities)["devices"]
    assert set(attributes(public.Delivery)) == set(public.Delivery.__members__)


def test_docstrings_stay_as_they_are_where_there_is_no_source(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_source(_: object) -> str:
        raise OSError

    before = public.Bucket.__doc__
    monkeypatch.setattr(inspect, "getsource", no_source)
    document_fields(public.Bucket.__module__)
    assert public.Bucket.__doc__ == before
