"""Messages of an environment become the tokens that the chat template would write, and no earlier token changes."""

from __future__ import annotations

import runpy
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken

from weightlane.ckpt_engines import ConfigError
from weightlane.trainer.data.tokenizer import HfTokenizer
from weightlane.trainer.loop.environments.rendering import Renderer

PREPARE = Path(__file__).parents[4] / "examples" / "arithmetic" / "prepare.py"
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
FORGETFUL = CHATML.replace("{{ m.content }}", "{{ m.content.split('/')[-1] if not loop.last else m.content }}")
"""Drops an assistant's thoughts, up to a slash, once another message follows, as Qwen3's template does."""
STRICT = (
    "{% for m in messages %}{% if m.role == 'tool' %}"
    "{% if not messages[loop.index0 - 1].tool_calls %}{{ raise_exception('no call') }}{% endif %}[RESULT]{{ m.content }}[/RESULT]"
    "{% elif m.tool_calls %}[CALLS]{{ m.tool_calls[0].function | tojson }}{{ eos_token }}"
    "{% elif m.role == 'user' %}[INST]{{ m.content }}[/INST]{% else %}{{ m.content }}{{ eos_token }}{% endif %}{% endfor %}"
)
"""Writes a tool's answer after a call only, and no text beside a call, as Mistral's templates do."""
DEAF = "{% for m in messages if m.role == 'user' %}{{ m.content }}{% endfor %}"
ANSWER = [{"role": "tool", "name": "add", "content": "42"}]
MORE = [{"role": "user", "content": "more"}]


@pytest.fixture(autouse=True)
def no_warning(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """Texts longer than a tokenizer says are nobody's concern: the run has a limit of its own."""
    yield
    assert not [record for record in caplog.get_records("call") if "longer than" in record.message]


def material(folder: Path, template: str) -> tuple[HfTokenizer, Renderer, int, int]:
    """The tokenizer, a renderer, and the ids of a stop token that the template writes and of one that it does not."""
    made = runpy.run_path(str(PREPARE))["make_tokenizer"]()
    made.add_tokens([AddedToken(token, special=True, normalized=False) for token in ("<|im_start|>", "<|im_end|>")])
    made.chat_template, made.model_max_length = template, 4
    made.save_pretrained(folder)
    own, other = made.convert_tokens_to_ids(["<|im_end|>", "<|endoftext|>"])
    tokenizer = HfTokenizer(folder, begins=False)
    return tokenizer, Renderer(tokenizer, [own, other]), own, other


@pytest.mark.parametrize("news", [ANSWER, MORE, [*ANSWER, *ANSWER, *MORE]], ids=["tool", "user", "several"])
def test_a_conversation_that_goes_on_has_the_tokens_of_the_whole_rendered_at_once(tmp_path: Path, news: Any) -> None:
    tokenizer, renderer, own, other = material(tmp_path, CHATML)
    question = [{"role": "user", "content": "20+22"}]
    opening, reply = renderer.opening(question, {}), tokenizer.encode("thought/forty-two")
    whole = tokenizer.encode(
        tokenizer.as_chat([*question, {"role": "assistant", "content": "thought/forty-two"}, *news])
    )
    assert [*opening, *reply, own, *renderer.continuation(news, {}, [*reply, own])] == whole
    assert [*opening, *reply, *renderer.continuation(news, {}, reply)] == whole, "a reply that was cut is ended"
    assert renderer.continuation(news, {}, [*reply, other])[0] == own, "another end is read, and so is the template's"
    assert renderer.text([*reply, own]) == "thought/forty-two"
    assert renderer.continuation("", {}, reply) == []
    assert renderer.continuation("no template", {}, reply) == tokenizer.encode("no template")


def test_a_template_that_would_rewrite_what_was_said_changes_no_token_of_it(tmp_path: Path) -> None:
    tokenizer, renderer, own, _ = material(tmp_path, FORGETFUL)
    _, plain, _, _ = material(tmp_path / "plain", CHATML)
    reply = [*tokenizer.encode("thought/42"), own]
    assert renderer.continuation(MORE, {}, reply) == plain.continuation(MORE, {}, reply)
    talk = [MORE[0], {"role": "assistant", "content": "thought/42"}, MORE[0]]
    assert "thought" not in tokenizer.as_chat(talk)


@pytest.mark.parametrize("template", [STRICT, STRICT.replace("{{ raise_exception('no call') }}", "{% continue %}")])
def test_a_template_that_wants_a_call_before_a_tools_answer_gets_one(template: str, tmp_path: Path) -> None:
    tokenizer, renderer, _, other = material(tmp_path, template)
    reply = [*tokenizer.encode("[CALLS]any"), other]
    found = renderer.continuation(ANSWER, {}, reply)
    assert tokenizer.decode(found) == "[RESULT]42[/RESULT]"
    assert tokenizer.decode(renderer.continuation(ANSWER, {}, reply[:-1])) == "<|endoftext|>[RESULT]42[/RESULT]"


@pytest.mark.parametrize(
    ("template", "news", "says"),
    [
        (DEAF, MORE, "does not write a reply as it stands"),
        (STRICT.replace("{{ eos_token }}", "."), ANSWER, "does not write all messages that follow a reply"),
        (STRICT, [{"role": "user"}, {"role": "tool"}], "the chat template refuses"),
    ],
)
def test_a_template_that_cannot_go_on_is_refused(
    tmp_path: Path, template: str, news: list[Mapping[str, Any]], says: str
) -> None:
    _, renderer, own, _ = material(tmp_path, template)
    with pytest.raises(ConfigError, match=says):
        renderer.continuation(news, {}, [own])
