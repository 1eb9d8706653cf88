"""Examples of supervised fine-tuning: exactly the assistant's words are trained on, and a bad line is named by its number."""

from __future__ import annotations

import json
import runpy
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from weightlane.ckpt_engines import ConfigError
from weightlane.trainer.data.batch import IGNORED, TokenSequence
from weightlane.trainer.data.sft_examples import Examples, load_examples
from weightlane.trainer.data.tokenizer import HfTokenizer

PREPARE = Path(__file__).parents[3] / "examples" / "arithmetic" / "prepare.py"
END = "<|endoftext|>"
PLAIN = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}<|endoftext|>\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)
FORGETFUL = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content.split('/')[-1] if not loop.last else m.content }}<|endoftext|>\n"
    "{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
)
"""Drops an assistant's thoughts, up to a slash, once another message follows."""
TALK = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "1+1"},
    {"role": "assistant", "content": "hm/2"},
    {"role": "user", "content": "2+2"},
    {"role": "assistant", "content": "oh/4"},
    {"role": "user", "content": "thanks"},
]


class Material:
    """A tokenizer of one token per byte, whose ids this test can read by itself."""

    def __init__(self, folder: Path, template: str | None) -> None:
        made = runpy.run_path(str(PREPARE))["make_tokenizer"]()
        made.chat_template = template
        made.save_pretrained(folder / "model")
        self.folder, self.tokenizer = folder, HfTokenizer(folder / "model")
        self.eos = made.eos_token_id
        self._byte = {made.convert_tokens_to_ids(token): token for token in made.get_vocab()}

    def load(self, *lines: Any, max_tokens: int = 500, **more: Any) -> Examples:
        path = self.folder / "lines.jsonl"
        path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
        return load_examples(path, self.tokenizer, [self.eos], max_tokens=max_tokens, **more)

    def text(self, ids: Sequence[int]) -> str:
        return "".join(self._byte[each] for each in ids).replace("Ġ", " ").replace("Ċ", "\n")

    def read(self, sequence: TokenSequence) -> str:
        return self.text(sequence.tokens.tolist())

    def trained(self, sequence: TokenSequence) -> str:
        """The targets, with a bar wherever some tokens are left out between two of them."""
        targets = sequence.targets.tolist()
        parts = "".join("\0" if target == IGNORED else self.text([target]) for target in targets)
        return "|".join(part for part in parts.split("\0") if part)


@pytest.fixture
def plain(tmp_path: Path) -> Material:
    return Material(tmp_path, PLAIN)


def test_exactly_the_words_of_the_assistant_and_the_tokens_that_end_them_are_trained_on(plain: Material) -> None:
    first, second, talk = plain.load(
        {"prompt": "12+34=", "completion": "46", "more": 1}, {"prompt": "a", "completion": "b"}, {"messages": TALK}
    ).all
    assert (plain.read(first.sequence), plain.trained(first.sequence)) == ("12+34=46", f"46{END}")
    assert (plain.read(second.sequence), plain.trained(second.sequence)) == ("ab", f"b{END}")
    assert second.place.endswith("lines.jsonl, line 2")
    written = f"[system]Be brief.{END}\n[user]1+1{END}\n[assistant]hm/2{END}\n[user]2+2{END}\n[assistant]oh/4{END}\n"
    assert plain.read(talk.sequence) == written[:-1], "the last token is a target alone"
    assert plain.trained(talk.sequence) == f"hm/2{END}|oh/4{END}"


def test_an_answer_that_the_template_writes_differently_later_is_trained_on_as_the_model_gave_it(
    tmp_path: Path,
) -> None:
    forgetful = Material(tmp_path, FORGETFUL)
    first, second = (example.sequence for example in forgetful.load({"messages": TALK}).all)
    assert forgetful.trained(first) == f"hm/2{END}"
    assert forgetful.read(second).startswith(f"[system]Be brief.{END}\n[user]1+1{END}\n[assistant]2{END}\n[user]")
    assert forgetful.trained(second) == f"oh/4{END}"


def test_examples_that_are_too_long_are_refused_or_left_out_and_counted(plain: Material) -> None:
    lines = [{"prompt": "12", "completion": "3"}, {"prompt": "12", "completion": "345"}, {"messages": TALK}]
    with pytest.raises(ConfigError, match=r"line 2: 6 tokens, and at most 5 are allowed.*data\.max_tokens"):
        plain.load(*lines, max_tokens=5)
    found = plain.load(*lines, max_tokens=5, too_long="skip")
    assert [plain.read(example.sequence) for example in found.all] == ["123"]
    assert found.skipped == 2
    assert len(plain.load(lines[1], max_tokens=6).all) == 1
    with pytest.raises(ConfigError, match="all 2 examples"):
        plain.load(*lines[1:], max_tokens=5, too_long="skip")


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ('{"prompt": "1",', r"line 2: not valid JSON: .* at column"),
        ({"prompt": "1"}, r"line 2: 'completion' must be a non-empty string, not None.*this one has 'prompt'"),
        ({"messages": TALK[:2]}, r"line 2: no message has the role 'assistant'"),
        ({"messages": [{"role": "assistant"}]}, r"line 2: 'messages' must be a list of messages"),
        ("", "holds no example"),
    ],
)
def test_a_bad_line_is_named_by_its_number_and_by_what_is_wrong_with_it(plain: Material, line: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        plain.load(*[{"prompt": "a", "completion": "b"}] * bool(line), line)


def test_a_template_that_is_missing_refuses_or_writes_answers_as_no_model_gives_them_is_named_with_the_line(
    tmp_path: Path,
) -> None:
    thinking = PLAIN + "{% if add_generation_prompt %}<think>{% endif %}"
    for name, template, said in (
        ("none", None, "line 1: the model's tokenizer has no chat template"),
        ("refusing", "{{ raise_exception('not so') }}", "line 1: the chat template refuses .*not so"),
        ("other", thinking, "line 1: the chat template writes message 2"),
    ):
        with pytest.raises(ConfigError, match=said):
            Material(tmp_path / name, template).load({"messages": TALK})


def test_a_file_that_is_missing_is_named_with_its_setting(plain: Material) -> None:
    with pytest.raises(ConfigError, match=r"there is no example file .*nowhere\.jsonl.*Check data\.heldout"):
        load_examples(Path("nowhere.jsonl"), plain.tokenizer, [0], max_tokens=9, setting="data.heldout")
