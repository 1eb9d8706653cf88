"""``help()`` of the public data classes says what each field means."""

from __future__ import annotations

import dataclasses
import pydoc
import re
import subprocess
import sys

import pytest
from waiting import HANG_S

import weightlane.ckpt_engines as public
from weightlane.ckpt_engines import Delivery

CLASSES = [cls for cls in vars(public).values() if isinstance(cls, type) and dataclasses.is_dataclass(cls)]


def attributes(cls: type) -> dict[str, str]:
    """The section about fields in what ``help(cls)`` prints."""
    text = pydoc.plain(pydoc.render_doc(cls)).replace(" |  ", "")
    section = text.partition("Attributes:\n")[2].partition("\n\n")[0]
    return dict(re.findall(r"^ +(\w+): (.+)$", section, re.MULTILINE))


@pytest.mark.parametrize("cls", [cls for cls in CLASSES if cls.__module__.endswith(("contract", "registry"))])
def test_help_explains_every_field(cls: type) -> None:
    explained = attributes(cls)
    assert [field.name for field in dataclasses.fields(cls) if field.name not in explained] == []
    assert "cpu" in attributes(public.Capabilities)["devices"]


def test_help_explains_every_way_of_delivery() -> None:
    assert set(attributes(Delivery)) == set(Delivery.__members__)


def test_the_contract_can_be_imported_without_its_source() -> None:
    program = (
        "import inspect, torch.distributed\n"
        "def fail(_): raise OSError\n"
        "inspect.getsource = fail\n"
        "from weightlane.ckpt_engines import Bucket\n"
        "assert 'Attributes' not in Bucket.__doc__"
    )
    subprocess.run([sys.executable, "-c", program], check=True, timeout=HANG_S)
