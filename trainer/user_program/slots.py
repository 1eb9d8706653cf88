"""The slots of a `TrainerRank`: which adapter computes an input."""

from __future__ import annotations

from typing import Literal, Self

from weightlane.ckpt_engines import ConfigError, ProtocolError

from ..engines.lora.program_engine import OWN
from .inputs import PART, ForwardInput, Unset

SlotKind = Literal["lora", "checkpoint"]
BASE = OWN
"""The model's own weights as a slot: in steps, norms, `TrainerRank.save` and `TrainerRank.load_checkpoint`."""


class PushedSlot:
    """A pushed slot. As a context manager, it is popped at the end of the block."""

    def __init__(self, pushed: list[str]) -> None:
        self._pushed, self._depth = pushed, len(pushed)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if len(self._pushed) != self._depth:
            raise ProtocolError(
                "what is pushed at the end of a block is not what was pushed at its beginning.",
                part=PART,
                hint="Pop inside the block what is pushed inside it.",
            )
        self._pushed.pop()


class Slots:
    """The part of a `TrainerRank` that chooses the slot of an input: its own, else the one pushed last, else the default."""

    def __init__(self, *, train_base: bool) -> None:
        self._trains_base = train_base
        self._kinds: dict[str, SlotKind] = {}
        """The kind of each loaded adapter by name, in the order in which they were loaded."""
        self._default = BASE
        self._pushed: list[str] = []

    def set_lora(self, name: str | None) -> None:
        """Let this LoRA, or the model's own weights, compute inputs that name no slot."""
        self._default = self._slot("lora", name)

    def set_checkpoint(self, name: str | None) -> None:
        """Let this checkpoint, or the model's own weights, compute inputs that name no slot."""
        self._default = self._slot("checkpoint", name)

    def push_lora(self, name: str | None) -> PushedSlot:
        """Like `set_lora`, until it is popped: by `pop_pushed_lora_or_checkpoint`, or at the end of a ``with`` block."""
        self._pushed.append(self._slot("lora", name))
        return PushedSlot(self._pushed)

    def push_checkpoint(self, name: str | None) -> PushedSlot:
        """Like `set_checkpoint`, until it is popped: by `pop_pushed_lora_or_checkpoint`, or at the end of a ``with`` block."""
        self._pushed.append(self._slot("checkpoint", name))
        return PushedSlot(self._pushed)

    def pop_pushed_lora_or_checkpoint(self) -> None:
        """Undo the last push."""
        if not self._pushed:
            raise ProtocolError("no LoRA or checkpoint is pushed.", part=PART, hint="Pop as often as you push.")
        self._pushed.pop()

    def _slot(self, kind: SlotKind, name: str | None) -> str:
        """The slot of that kind and name; `ConfigError` if there is none."""
        if name is None or name == BASE:
            return BASE
        if self._kinds.get(name) != kind:
            other = self._kinds.get(name)
            found = f"{name!r} is a {plain(other)}" if other else f"there is no {plain(kind)} {name!r}"
            known = [each for each, its in self._kinds.items() if its == kind]
            raise ConfigError(
                f"{found}.",
                part=PART,
                hint=f"Load it by load_{kind}. A {plain(kind)} can be: {', '.join(known) or 'none yet'}.",
            )
        return name

    def _slot_of(self, each: ForwardInput) -> str:
        """The slot that computes an input."""
        if not isinstance(each.checkpoint, Unset):
            return self._slot("checkpoint", each.checkpoint)
        if not isinstance(each.lora, Unset):
            return self._slot("lora", each.lora)
        return self._pushed[-1] if self._pushed else self._default

    @property
    def _checkpoints(self) -> list[str]:
        """Names of the checkpoints, which are the trained adapters."""
        return [name for name, kind in self._kinds.items() if kind == "checkpoint"]

    @property
    def _trained(self) -> list[str]:
        """All slots that are trained, in the order in which they are stepped."""
        return [BASE, *self._checkpoints] if self._trains_base else self._checkpoints

    def _refuse_frozen(self) -> None:
        if not self._trains_base:
            raise ConfigError(
                "the model's own weights are frozen.", part=PART, hint="Make the TrainerRank with train_base=True."
            )


def plain(kind: SlotKind) -> str:
    """The kind as messages and documentation spell it."""
    return "LoRA" if kind == "lora" else "checkpoint"


def called(slot: str) -> str:
    """The slot as messages call it."""
    return repr(slot) if slot != BASE else "the model's own weights"
