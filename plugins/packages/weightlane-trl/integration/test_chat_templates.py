"""The chat templates of real models, which TRL has copies of: an environment's messages become what each writes after a reply."""

from __future__ import annotations

import importlib.util
import runpy
from pathlib import Path
from typing import Any

import pytest
from tokenizers import AddedToken

from weightlane.ckpt_engines import ConfigError
from weightlane.trainer.loop.environments import Renderer

(TRL,) = importlib.util.find_spec("trl").submodule_search_locations
TEMPLATES = {
    path.stem: path
    for path in sorted(Path(TRL, "chat_templates").glob("*.jinja"))
    if not path.stem.endswith("_training")
}
PREPARE = Path(__file__).parents[4] / "examples/arithmetic/prepare.py"
ENDS = (
    *(
        "<|im_end|>",
        "<|eot_id|>",
        "<end_of_turn>",
        "</s>",
        "<|END_OF_TURN_TOKEN|>",
        "<|end|>",
        "<|call|>",
        "<|return|>",
    ),
    *("<|user|>", "<|observation|>", "<eos>", "<|eot|>", "<turn|>", "<\uff5cend\u2581of\u2581sentence\uff5c>"),
)
"""Tokens that end a reply of one of these models."""
REFUSED = {"user": {"idefics3", "llava_next", "smolvlm"}}
"""Templates whose messages are lists of parts, for images; of tools' answers also those that know no tool, and those of Gemma 4,
which write the answer into the model's turn."""
REFUSED["tool"] = REFUSED["user"] | {"cohere", "cohere2", "gemma", "gemma3", "phi3", "phi3_5"}
REFUSED["tool"] |= {"gemma4", "gemma4_v3", "gemma4_v4", "gemma4_v5", "diffusion_gemma"}
OPENS_THE_REPLY = {
    *("deepseek_r1_distill", "deepseekv3", "glm4moe", "gptoss", "muse_glimmer", "qwen3_5_nothink", "qwen3_5_think"),
    *("qwen3_6", "qwen3_8", "nemotron_3_5_lightning", "nemotron_3_nano", "nemotron_3_super", "nemotron_3_ultra"),
}
"""Templates that put thoughts or a channel around an earlier reply, or leave them out: the model has to write its own."""
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "add",
            "description": "Adds.",
            "parameters": {
                "type": "object",
                "properties": {"x": {"type": "string", "description": "x"}},
                "required": ["x"],
            },
        },
    }
]


class Tokenizer:
    """A tokenizer as a renderer uses one."""

    def __init__(self, made: Any) -> None:
        self._made = made

    def encode(self, text: str, *, within: bool = False) -> list[int]:
        return self._made.encode(text, add_special_tokens=False)

    def decode(self, token_ids: list[int]) -> str:
        return self._made.decode(list(token_ids), skip_special_tokens=False)

    def as_chat(self, messages: Any, **options: Any) -> str:
        try:
            return self._made.apply_chat_template(list(messages), add_generation_prompt=True, tokenize=False, **options)
        except Exception as cause:
            raise ConfigError(f"refused: {cause}.", part="data") from cause


NEWS = {"user": {"role": "user", "content": "more"}, "tool": {"role": "tool", "name": "add", "content": "42"}}


@pytest.mark.parametrize("kind", ["user", "tool"])
@pytest.mark.parametrize("name", TEMPLATES)
def test_what_follows_a_reply_is_what_the_template_writes_there(name: str, kind: str) -> None:
    made = runpy.run_path(str(PREPARE))["make_tokenizer"]()
    made.add_tokens([AddedToken(token, special=True, normalized=False) for token in ENDS])
    made.bos_token, made.chat_template = "<|bos|>", TEMPLATES[name].read_text()
    tokenizer = Tokenizer(made)
    renderer = Renderer(tokenizer, made.convert_tokens_to_ids(list(ENDS)))
    options: dict[str, Any] = {"tools": TOOLS} if kind == "tool" else {}
    if name in REFUSED[kind]:
        with pytest.raises(ConfigError):
            renderer.continuation([NEWS[kind]], options, [])
        return
    found = tokenizer.decode(renderer.continuation([NEWS[kind]], options, []))
    assert NEWS[kind]["content"] in found
    question = {"role": "user", "content": "question"}
    opening = tokenizer.as_chat([question], **options)
    if name in OPENS_THE_REPLY:
        begins = opening.rstrip()[-8:]
        assert name in {"deepseek_r1_distill", "deepseekv3"} or found.rstrip().endswith(begins)
    else:
        whole = tokenizer.as_chat([question, {"role": "assistant", "content": "answer"}, NEWS[kind]], **options)
        assert whole == opening + "answer" + found
