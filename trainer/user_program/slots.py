"""The slots of a `TrainerRank`: which adapter computes an input."""

from __future__ import annotations

from typing import Literal, Self

from weightlane.ckpt_engines import ConfigError, ProtocolError

from .inputs import PART, ForwardInput, Unset

SlotKind = Literal["lora", "checkpoint"]
BASE = ""
"""The model's own weights."""


class Slots:
    """Names of loaded adapters, the default slot, and the stack of pushed slots."""

    def __init__(self) -> None:
        self.kinds: dict[str, SlotKind] = {}
        """The kind of each name, in the order in which they were loaded."""
        self.default = BASE
        self._pushed: list[str] = []

    def named(self, kind: SlotKind, name: str | None) -> str:
        """The slot of that kind and name; `ConfigError` if there is none."""
        if name is None:
            return BASE
        if self.kinds.get(name) != kind:
            other = self.kinds.get(name)
            found = f"{name!r} is a {plain(other)}" if other else f"there is no {plain(kind)} {name!r}"
            known = [each for each, its in self.kinds.items() if its == kind]
            raise ConfigError(
                f"{found}.",
                part=PART,
                hint=f"Load it by load_{kind}. A {plain(kind)} can be: {', '.join(known) or 'none yet'}.",
            )
        return name

    def of(self, each: ForwardInput) -> str:
        """The slot that computes an input: its own, or the one pushed last, or the default."""
        if not isinstance(each.checkpoint, Unset):
            return self.named("checkpoint", each.checkpoint)
        if not isinstance(each.lora, Unset):
            return self.named("lora", each.lora)
        return self._pushed[-1] if self._pushed else self.default

    @property
    def checkpoints(self) -> list[str]:
        """Names of the checkpoints, which are the trained adapters."""
        return [name for name, kind in self.kinds.items() if kind == "checkpoint"]

    def push(self, name: str) -> PushedSlot:
        """Let `name` compute inputs that name no slot, until it is popped."""
        self._pushed.append(name)
        return PushedSlot(self, len(self._pushed))

    def pop(self) -> None:
        """Undo the last `push`."""
        if not self._pushed:
            raise ProtocolError("no LoRA or checkpoint is pushed.", part=PART, hint="Pop as often as you push.")
        self._pushed.pop()

    @property
    def depth(self) -> int:
        """Number of pushed slots."""
        return len(self._pushed)


class PushedSlot:
    """A pushed slot. As a context manager, it is popped at the end of the block."""

    def __init__(self, slots: Slots, depth: int) -> None:
        self._slots, self._depth = slots, depth

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._slots.depth != self._depth:
            raise ProtocolError(
                "what is pushed at the end of a block is not what was pushed at its beginning.",
                part=PART,
                hint="Pop inside the block what is pushed inside it.",
            )
        self._slots.pop()


def plain(kind: SlotKind | None) -> str:
    """The kind as messages and documentation spell it."""
    return "LoRA" if kind == "lora" else "checkpoint"


class SlotChoice:
    """The methods of `TrainerRank` that choose the slot of an input: its own, else the pushed one, else the default."""

    def __init__(self) -> None:
        self._slots = Slots()

    def set_lora(self, name: str | None) -> None:
        """Let this LoRA, or the model's own weights, compute inputs that name no slot."""
        self._slots.default = self._slots.named("lora", name)

    def set_checkpoint(self, name: str | None) -> None:
        """Let this checkpoint, or the model's own weights, compute inputs that name no slot."""
        self._slots.default = self._slots.named("checkpoint", name)

    def push_lora(self, name: str | None) -> PushedSlot:
        """Like `set_lora`, until it is popped: by `pop_pushed_lora_or_checkpoint`, or at the end of a ``with`` block."""
        return self._slots.push(self._slots.named("lora", name))

    def push_checkpoint(self, name: str | None) -> PushedSlot:
        """Like `set_checkpoint`, until it is popped: by `pop_pushed_lora_or_checkpoint`, or at the end of a ``with`` block."""
        return self._slots.push(self._slots.named("checkpoint", name))

    def pop_pushed_lora_or_checkpoint(self) -> None:
        """Undo the last push."""
        self._slots.pop()
