"""Settings of supervised fine-tuning: its files and its length."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field

from ..config import Section, TextDataConfig


class SftDataConfig(TextDataConfig):
    """Example files: JSON Lines, one object per line, with prompt and completion or with messages."""

    train: Path = Field(
        description="JSONL file of examples: prompt and completion, two strings; or messages, a list of messages with role and"
        " content, of which those of the assistant are trained on."
    )
    prompt_key: str = Field(default="prompt", min_length=1, description="Key of the prompt in each line.")
    completion_key: str = Field(
        default="completion",
        min_length=1,
        description="Key of the completion in each line, such as answer in task files.",
    )
    heldout: Path | None = Field(
        default=None,
        description="JSONL file of examples that are not trained on, whose mean log-probability is measured.",
    )
    max_tokens: int | None = Field(
        default=None,
        ge=2,
        description="Most tokens of an example, prompt and completion together; none: the model's max_position_embeddings.",
    )
    too_long: Literal["refuse", "skip"] = Field(
        default="refuse",
        description="What becomes of an example with more tokens. refuse: the run does not start. skip: it is left out, and"
        " counted.",
    )


class SftConfig(Section):
    """Length, batches and bookkeeping of supervised fine-tuning."""

    epochs: int = Field(default=1, ge=1, description="How often every example is trained on, unless steps is set.")
    steps: int | None = Field(
        default=None,
        ge=1,
        description="Optimizer steps of the whole run, resumed parts included, in the place of epochs.",
    )
    batch_size: int = Field(default=32, ge=1, description="Examples in one optimizer step.")
    evaluate_every: int = Field(
        default=0,
        ge=0,
        description="Measure the held-out examples every so many steps, too; before and after the training they always are.",
    )
    save_every: int = Field(
        default=0,
        ge=0,
        description="Save the full training state every so many steps, and at the end; 0 only at the end.",
    )
    export_every: int = Field(
        default=0,
        ge=0,
        description="Write the model, or with trainer.lora the adapter, to exports/step-N every so many steps; at the end it is"
        " always written.",
    )
    max_failed_share: float = Field(
        default=0.1,
        ge=0,
        le=1,
        description="Share of the last 20 optimizer steps that may fail, as a step does whose gradient is not finite, before the"
        " run ends; each costs its examples one turn.",
    )

    def all_steps(self, examples: int) -> int:
        """Optimizer steps of a run with so many examples."""
        return self.steps if self.steps is not None else -(-self.epochs * examples // self.batch_size)
