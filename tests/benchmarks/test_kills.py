"""The benchmark that kills replicas notices a sample that is lost, or trained twice."""

from __future__ import annotations

import json
from pathlib import Path
from types import ModuleType

import pytest

STEPS = 2


@pytest.mark.parametrize("wrong", ["", "a sample is lost", "a group is trained twice", "and in the place of another"])
def test_each_prompt_is_to_be_trained_once_by_a_full_group(kills: ModuleType, tmp_path: Path, wrong: str) -> None:
    prompts = [f"{number}+1=" for number in range(STEPS * kills.PROMPTS_PER_STEP)]
    groups = [{"step": number // kills.PROMPTS_PER_STEP + 1, "prompt": prompt} for number, prompt in enumerate(prompts)]
    samples = [each for each in groups for _ in range(kills.GROUP_SIZE)]
    if wrong == "a sample is lost":
        del samples[9]
    elif wrong:
        samples += [samples[0] | {"step": STEPS}] * kills.GROUP_SIZE
        del samples[-2 * kills.GROUP_SIZE : -kills.GROUP_SIZE if "place" in wrong else -2 * kills.GROUP_SIZE]
    path = tmp_path / "samples.jsonl"
    path.write_text("".join(json.dumps(sample) + "\n" for sample in samples))
    assert kills.trained_once(kills.prompts_of(path)) is not bool(wrong)
