"""Lists every configuration key from the models that check it.

``python docs/site/configuration.py`` writes the reference page.
"""

from __future__ import annotations

import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Union, get_args, get_origin

from pydantic import BaseModel

from weightlane.cli.config.run_config import RunConfig
from weightlane.cli.config.sft_config import SftRunConfig
from weightlane.cli.config.tinker_config import TinkerConfig
from weightlane.cli.config.validation import FILLED_IN
from weightlane.cli.config.worker_config import RolloutsSection, WorkerSection
from weightlane.cli.engines.reference import markdown_table, option_row

PAGE = Path(__file__).resolve().parents[1] / "reference/configuration.md"
HEAD = """# Configuration keys

Every key of a run's TOML file, made from the models that check it by `python docs/site/configuration.py`.
`weightlane config FILE` prints the same for a file, with the values that hold. How keys belong together:
[Configuring a run](../guides/configuring-a-run.md).
"""
SUPERVISED = """
## Supervised fine-tuning

`weightlane sft` has the sections `run`, `model`, `trainer`, `ray` and `observers` of above, and these two.
"""
SERVED = """
## The service

`weightlane tinker` has the sections `run`, `model`, `checkpoint_engine`, `sync`, `trainer`, `rollout`, `ray` and `observers` of
above, and this one.
"""

WORKED = """
## Of a worker

`weightlane worker` has the sections `model`, `algorithm`, `trainer`, `critic`, `reference`, `checkpoint_engine`, `sync`, `ray`
and `observers` of above, and these. `worker` must be there; without `checkpoint_engine` a worker publishes nothing.
"""


def sections(path: str, model: type[BaseModel]) -> Iterator[str]:
    """A section's heading and table, and those of the sections inside it."""
    inner: list[tuple[str, type[BaseModel]]] = []
    rows = []
    for name, field in model.model_fields.items():
        if f"{path}.{name}" in FILLED_IN:
            continue
        if section := _section_in(field.annotation):
            inner.append((f"{path}.{name}" if path else name, section))
            continue
        rows.append(option_row(name, field))
    if path:
        yield f"\n## [{path}]\n\n{(model.__doc__ or '').strip().splitlines()[0]}\n\n"
    if rows:
        yield markdown_table(("key", "type", "default", "meaning"), rows)
    for inner_path, section in inner:
        yield from sections(inner_path, section)


def _section_in(annotation: Any) -> type[BaseModel] | None:
    """The model of a key that is a section, also of one that may be left out."""
    if get_origin(annotation) in (Union, types.UnionType):
        return next((found for each in get_args(annotation) if (found := _section_in(each))), None)
    return annotation if isinstance(annotation, type) and issubclass(annotation, BaseModel) else None


def page() -> str:
    """The page's Markdown."""
    own = {name: SftRunConfig.model_fields[name].annotation for name in ("sft", "data")}
    supervised = "".join(line for name, section in own.items() if section for line in sections(name, section))
    # Its data section has the name of another one above.
    supervised = supervised.replace("## [data]", "## [data] of supervised fine-tuning")
    service = TinkerConfig.model_fields["service"].annotation
    assert service is not None
    of_runs = [*sections("", RunConfig), SUPERVISED, supervised, SERVED, *sections("service", service)]
    parts = [*of_runs, WORKED, *sections("worker", WorkerSection), *sections("rollouts", RolloutsSection)]
    return HEAD + "".join(parts).rstrip() + "\n"


if __name__ == "__main__":
    PAGE.write_text(page())
