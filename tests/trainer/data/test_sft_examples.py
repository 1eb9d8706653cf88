"""Examples of supervised fine-tuning: exactly the assistant's words are trained on, and a bad line is named by its number."""

from __future__ import annotations

import json
import runpy
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from weightlane.ckpt_engines import ConfigError
from weightlane.trainer.data.sequences import IGNORED, TokenSequence
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


def test_what_a_line_says_of_training_tools_and_the_template_is_done(tmp_path: Path) -> None:
    template = "{% for t in tools or [] %}<{{ t.name }}>{% endfor %}{{ mode }}" + PLAIN
    material = Material(tmp_path, template.replace("{{ m.content }}", "{{ m.content or m.tool_calls[0].name }}"))
    left_out = [*TALK[:2], {**TALK[2], "weight": 0}, *TALK[3:]]
    call = [
        *TALK[:2],
        {"role": "assistant", "content": None, "tool_calls": [{"name": "add"}]},
        {"role": "tool", "content": "2"},
    ]
    first, second = material.load(
        {"messages": left_out, "tools": [{"name": "add"}], "chat_template_kwargs": {"mode": "!"}},
        {"messages": [*call, {"role": "assistant", "content": "2", "train": True}]},
    ).all
    assert material.read(first.sequence).startswith(f"<add>![system]Be brief.{END}")
    assert material.trained(first.sequence) == f"oh/4{END}"
    assert material.trained(second.sequence) == f"add{END}|2{END}"


def test_a_file_as_editors_of_other_systems_write_it_is_read(plain: Material) -> None:
    lines = "\ufeff" + "".join(json.dumps({"prompt": p, "completion": "c"}) + "\r\n" for p in "ab")
    (plain.folder / "windows.jsonl").write_bytes(lines.encode())
    found = load_examples(plain.folder / "windows.jsonl", plain.tokenizer, [plain.eos], max_tokens=9)
    assert [plain.read(example.sequence) for example in found.all] == ["ac", "bc"]


@pytest.fixture(scope="module")
def sentencepiece(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer that writes blanks as parts of words, begins texts with a token of its own, and has thoughts."""
    made = Tokenizer(models.BPE(unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    made.decoder = decoders.Metaspace(prepend_scheme="first")
    special = ["<unk>", "<s>", "</s>", "<think>"]
    letters = sorted(set("[user][assistant]\n"))
    trainer = trainers.BpeTrainer(vocab_size=60, special_tokens=special, initial_alphabet=letters)
    made.train_from_iterator(["hi you yes no"], trainer)
    made.post_processor = processors.TemplateProcessing(single="<s> $A </s>", special_tokens=[("<s>", 1), ("</s>", 2)])
    template = PLAIN.replace(END, "</s>")
    fast = PreTrainedTokenizerFast(
        tokenizer_object=made, bos_token="<s>", eos_token="</s>", unk_token="<unk>", chat_template=template
    )
    folder = tmp_path_factory.mktemp("sentencepiece")
    fast.save_pretrained(folder)
    return folder


def test_tokens_are_those_of_the_whole_text(
    sentencepiece: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Tokenized alone, each part would begin with a blank that the text does not have."""
    tokenizer = HfTokenizer(sentencepiece)
    own: Any = tokenizer._tokenizer
    talk = [{"role": role, "content": text} for role, text in (("user", "hi you"), ("assistant", "no"), ("user", "hi"))]
    lines = [
        {"messages": [*talk, {"role": "assistant", "content": "yes"}]},
        {"prompt": "hi ", "completion": "you"},
        {"prompt": "hi", "completion": " you"},
    ]
    (tmp_path / "lines.jsonl").write_text("\n".join(map(json.dumps, lines)))
    found = load_examples(tmp_path / "lines.jsonl", tokenizer, [2], max_tokens=99)
    whole = own.apply_chat_template(lines[0]["messages"], tokenize=False), "hi you", "hi you"
    for example, text, special in zip(found.all, whole, (False, True, True), strict=True):
        ids, sequence = own(text, add_special_tokens=special)["input_ids"], example.sequence
        last = sequence.targets.tolist()[-1:] if special else []  # a conversation ends behind what is trained on
        assert [*sequence.tokens.tolist(), *last] == ids[: len(sequence.tokens) + len(last)]
    words = [own.decode([t for t in each.sequence.targets.tolist() if t != IGNORED]) for each in found.all]
    assert words == ["no</s>yes</s>", "you</s>", "you</s>"]
    assert "1 prompts end inside a token, that of" in caplog.text
    assert tokenizer.encode("hi") == [1, *HfTokenizer(sentencepiece, begins=False).encode("hi")]
    assert tokenizer.decode(own("<think>hi", add_special_tokens=False)["input_ids"]) == "<think>hi"


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


BAD_LINES: list[tuple[Any, str]] = [
    ('{"prompt": "1",', r"line 2: not valid JSON: .* at column"),
    ({"prompt": "1"}, r"line 2: 'completion' must be a non-empty string, not None.*this one has 'prompt'"),
    ({"messages": TALK[:2]}, r"line 2: no message has the role 'assistant'"),
    ({"messages": []}, r"line 2: 'messages' must be a list of messages, not \[\]"),
    ({"messages": [{"role": "assistant"}]}, r"line 2: 'messages', message 0: its content must be a string"),
    ({"messages": TALK[2:]}, "line 2: the conversation begins with the assistant"),
    ({"messages": [*TALK[:2], {**TALK[2], "loss": 1}]}, "line 2: 'messages', message 2: unknown key 'loss'"),
    ({"messages": [*TALK[:2], {**TALK[2], "weight": 0.5}]}, "line 2: 'messages', message 2: weight must be 0 or 1"),
    ({"messages": [*TALK[:2], {**TALK[2], "train": False}]}, "line 2: every message of the assistant is left out"),
    ({"messages": TALK, "loss_mask": [0]}, "line 2: the key 'loss_mask' is not read"),
    ({"messages": TALK, "tools": {}}, "line 2: 'tools' must be a list"),
    ({"messages": TALK, "chat_template_kwargs": 3}, "line 2: 'chat_template_kwargs' must be an object"),
    ('{"prompt": "a", "completion": "\\ud800"}', r"line 2: it holds half of a character, '\\ud800'"),
    ('{"prompt": "a", "completion": "b", "score": NaN}', "line 2: JSON that cannot be read: NaN is no JSON"),
    ("", "holds no example"),
]


def test_a_bad_line_is_named_by_its_number_and_by_what_is_wrong_with_it(plain: Material) -> None:
    for line, said in BAD_LINES:
        with pytest.raises(ConfigError, match=said):
            plain.load(*[{"prompt": "a", "completion": "b"}] * bool(line), line)


def test_a_template_that_is_missing_refuses_or_writes_answers_as_no_model_gives_them_is_named_with_the_line(
    tmp_path: Path,
) -> None:
    for name, template, said in (
        ("none", None, "line 1: the model's tokenizer has no chat template"),
        ("refusing", "{{ raise_exception('not so') }}", "line 1: the chat template refuses .*not so"),
        ("other", PLAIN + "{% if add_generation_prompt %}?{% endif %}", "line 1: the chat template writes message 2"),
        ("mute", "{% for m in messages if m.role == 'user' %}u{% endfor %}", "line 1: the assistant says"),
    ):
        with pytest.raises(ConfigError, match=said):
            Material(tmp_path / name, template).load({"messages": TALK})
