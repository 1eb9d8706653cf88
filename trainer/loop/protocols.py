"""`LoopParts` and `LoopState`, and the Protocols through which the loop uses trainers, rollouts, coordinator and tokenizer."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Coroutine, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, NoReturn, Protocol

import numpy as np
import numpy.typing as npt

from weightlane.ckpt_engines import ConfigError, ProtocolError, WeightlaneError
from weightlane.plugins import RunHooks
from weightlane.sync import Replica, ReplicaState, SyncReport

from ..data.batch import MiniBatch, TokenBatch
from ..data.step_result import StepResult
from ..data.tasks import Task
from ..objectives.named_advantages import Advantages


class Trainers(Protocol):
    """All trainer ranks together."""

    async def train_step(self, batch: TokenBatch, mini_batches: Sequence[MiniBatch]) -> StepResult:
        """Forward, backward and optimizer step on every rank, for each of `mini_batches` and as often as is configured."""

    async def publish(self, version: int) -> float:
        """Publish the current parameters as `version` on every rank; returns the seconds the slowest rank was blocked."""

    async def watch(self) -> NoReturn:
        """Raise `WorkerDiedError` when a rank's process dies."""


class SharedTrainers(Trainers, Protocol):
    """Trainer ranks whose devices rollouts use in turn."""

    async def offload(self) -> None:
        """Move everything to the host's memory. The next call moves back what it needs."""

    async def memory_use(self) -> Mapping[str, tuple[int, int]]:
        """The bytes that each rank holds, by its name, and the most since the call before: see `MemoryUse`."""


class Completion(Protocol):
    """A finished generation."""

    @property
    def token_ids(self) -> Sequence[int]:
        """Generated tokens, the stop token included."""

    @property
    def logprobs(self) -> Sequence[float]:
        """Log-probability of each token under the distribution it was drawn from."""

    @property
    def versions(self) -> Sequence[int]:
        """Weight version that produced each token."""

    @property
    def cached_tokens(self) -> int | None:
        """Tokens of the prompt that the engine had computed before and read from its cache; None if it does not say."""

    @property
    def routed_experts(self) -> npt.NDArray[np.int16] | None:
        """The experts of the tokens of prompt and completion but the last: [tokens - 1, decoder layers, experts per token].

        None unless the rollouts were asked for them.
        """


@dataclass(frozen=True, slots=True)
class Turn:
    """Tokens that the model read since its last completion, or as its prompt, and the completion that followed."""

    read_ids: Sequence[int]
    completion: Completion
    sequence: int = 0
    """The sequence of tokens that the turn belongs to. An episode has several if its conversation was rewritten."""


@dataclass(frozen=True, slots=True)
class Trajectory:
    """The turns of one episode; one turn without an environment."""

    turns: Sequence[Turn]

    @property
    def sequences(self) -> list[Trajectory]:
        """The turns of each sequence of tokens. Each generated token is in one of them."""
        return [self._sequence(number) for number in dict.fromkeys(turn.sequence for turn in self.turns)]

    @property
    def current(self) -> Trajectory:
        """The turns of the sequence to which the last turn belongs."""
        return self._sequence(self.turns[-1].sequence)

    def _sequence(self, number: int) -> Trajectory:
        return Trajectory([turn for turn in self.turns if turn.sequence == number])

    @property
    def token_ids(self) -> list[int]:
        """Generated tokens of all turns, stop tokens included."""
        return [token for turn in self.turns for token in turn.completion.token_ids]

    @property
    def logprobs(self) -> list[float]:
        """Log-probability of each generated token under the distribution it was drawn from."""
        return [logprob for turn in self.turns for logprob in turn.completion.logprobs]

    @property
    def versions(self) -> list[int]:
        """Weight version that produced each generated token."""
        return [version for turn in self.turns for version in turn.completion.versions]

    @property
    def whole(self) -> list[int]:
        """All tokens, read and generated, in the order of the turns."""
        return [token for turn in self.turns for part in (turn.read_ids, turn.completion.token_ids) for token in part]

    @property
    def routed_experts(self) -> npt.NDArray[np.int16]:
        """The experts of all tokens of `whole` but the last, of a trajectory that is one sequence: see `Completion`.

        A turn reads the tokens of earlier turns again, for its caches. Their experts are those of their first reading, by which
        their log-probabilities were computed.

        Raises `ProtocolError` if a completion came without experts, or with those of other tokens.
        """
        parts: list[npt.NDArray[np.int16]] = []
        known = tokens = 0
        for turn in self.turns:
            experts = turn.completion.routed_experts
            tokens += len(turn.read_ids) + len(turn.completion.token_ids)
            if experts is None or len(experts) != tokens - 1:
                raise ProtocolError(
                    f"{tokens - 1} tokens were read, and {'no' if experts is None else len(experts)} rows of experts returned.",
                    part="router replay",
                    hint="Set algorithm.router_replay to false.",
                )
            parts.append(experts[known:])
            known = tokens - 1
        return np.concatenate(parts)


@dataclass(frozen=True, slots=True)
class Played:
    """An episode that has ended: judged, or failed with `error`."""

    trajectory: Trajectory
    text: str = ""
    """Everything after the first prompt, as text."""
    reward: float = 0.0
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Further numbers of the environment, by name."""
    ended: str = ""
    """``full`` or ``turns`` if the episode was cut short; empty if the environment ended it."""
    error: WeightlaneError | None = None
    kind: str = ""
    """The kind of the failure: ``prompt``, ``request``, ``reward`` or ``environment``."""


class RolloutFigures(Protocol):
    """Running totals of a replica."""

    @property
    def max_token_gap_s(self) -> float:
        """Longest wait for a next token that spans a commit."""

    @property
    def tokens(self) -> int:
        """Tokens generated."""

    @property
    def recomputed_tokens(self) -> int:
        """Tokens that requests in flight prefilled again because of commits."""


class Rollout(Replica, Protocol):
    """A rollout replica: it generates, and commits versions."""

    async def announce(self, version: int, adapter: Any, keep: Collection[int] = ()) -> None:
        """Declare the adapter of a coming version, and the versions that stay loaded."""

    async def generate(self, request_id: str, prompt_ids: Sequence[int], max_new_tokens: int, **options: Any) -> Any:
        """Generate a completion."""

    async def generate_group(
        self,
        prompt_ids: Sequence[int],
        *,
        count: int,
        max_new_tokens: int,
        temperature: float,
        stop_token_ids: Sequence[int],
        greedy: bool = False,
    ) -> Sequence[Completion | WeightlaneError]:
        """Generate `count` completions of one prompt. A completion that fails by itself is replaced by its error."""

    async def stats(self) -> RolloutFigures:
        """Running totals since the replica started."""

    async def sleep(self) -> None:
        """Free weights and caches once all requests have ended, and refuse new ones. Does nothing if they are freed."""

    async def wake(self, part: Literal["weights", "caches"]) -> None:
        """Take back the memory of the weights, or afterwards of the caches; between the two a version has to be committed."""

    async def memory_use(self) -> Sequence[tuple[int, int]]:
        """The bytes that each rank holds, and the most since the call before: see `MemoryUse`."""

    async def watch(self) -> NoReturn:
        """Raise `WorkerDiedError` when the replica's process dies."""

    async def close(self) -> None:
        """End the replica and its processes by a deadline. Requests in flight fail. Never raises."""


class Syncer(Protocol):
    """Carries versions from the trainers to the rollouts."""

    async def sync(self, version: int) -> SyncReport:
        """Put the published `version` into service. Raises `SyncAbortedError` if it was aborted.

        The serving version may be synced again: it is then sent to the replicas that do not have it.
        """

    def states(self) -> Mapping[str, ReplicaState]:
        """The state of every replica by name; only those that serve may get requests."""

    def weights_lost(self, name: str) -> None:
        """Note that a replica has given up its weights: it is `ReplicaState.JOINING`, and gets the newest version again."""

    def participant_lost(self, error: WeightlaneError, replica: str = "") -> None:
        """Report the death of a replica, or of a trainer if `replica` is empty."""

    def add(self, replica: Rollout) -> None:
        """Let a replica take part from the next `sync` on. Not to be called during a `sync`."""

    def remove(self, name: str) -> None:
        """Stop counting a replica. Not to be called during a `sync`."""


class Tokenizer(Protocol):
    """Turns text into tokens and back."""

    def encode(self, text: str) -> Sequence[int]:
        """Token ids of a prompt."""

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of a completion as the model wrote it."""


@dataclass(frozen=True, slots=True)
class LoopState:
    """The loop's part of a saved state; the trainer saves its own."""

    step: int
    """Batches trained on; also the weight version."""
    stream: Mapping[str, Any]
    """Position in the stream of tasks."""
    outstanding: Sequence[Mapping[str, Any]]
    """Tasks drawn from the stream and not trained on yet."""

    def to_plain(self) -> dict[str, Any]:
        """This state as JSON-representable data."""
        return asdict(self)

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any]) -> LoopState:
        """Parse a saved state; `ConfigError` for anything else."""
        try:
            return cls(int(plain["step"]), dict(plain["stream"]), [dict(task) for task in plain["outstanding"]])
        except (KeyError, TypeError, ValueError) as error:
            raise ConfigError(f"the saved loop state is damaged: {error!r}.", part="resume") from None


class EpisodePlayer(Protocol):
    """Plays episodes of an environment."""

    async def play(self, rollout: Rollout, task: Task, *, greedy: bool) -> Played:
        """Play an episode of `task` with the model of `rollout`. Its errors are in the result."""


Judge = Callable[[str, Mapping[str, Any]], Awaitable[float]]
"""The reward of a completion of a task; raises `RewardError`."""
StartReplica = Callable[[str], Awaitable[Rollout]]
"""Starts and connects a replica of this name. Leaves nothing behind if it fails or is cancelled."""


@dataclass(frozen=True, slots=True)
class LoopParts:
    """Everything the loop drives."""

    trainers: Trainers
    rollouts: Sequence[Rollout]
    syncer: Syncer
    tokenizer: Tokenizer
    stop_token_ids: Sequence[int]
    judge: Judge
    train_tasks: Sequence[Task]
    heldout_tasks: Mapping[str, Sequence[Task]]
    """Sets of held-out tasks by name; a single one may have the name ``""``."""
    hooks: RunHooks
    save: Callable[[LoopState], Coroutine[Any, Any, None]]
    """Makes the run resumable from the given state."""
    export: Callable[[int], Coroutine[Any, Any, None]]
    """Writes the current parameters, which are those of the given step, as a model for others to load."""
    quorum: float = 1.0
    """Share of the replicas that must be left for the run to continue: see `Fleet`."""
    start_replica: StartReplica | None = None
    """Starts a further replica, or the successor of a dead one; None if the replicas are those that the run begins with."""
    max_replacements: int = 0
    """Most successors that are started."""
    follows_room: bool = False
    """Whether the number of replicas follows the room for them, instead of being restored by successors."""
    min_replicas: int = 1
    """With `follows_room`: fewer end the run."""
    drain_s: float = 60.0
    """Seconds in which a replica that is to leave may finish the groups that it generates."""
    shared: SharedTrainers | None = None
    """`trainers`, if they share devices with `rollouts`, which sleep when the loop begins; None if they do not."""
    max_model_len: int = 0
    """Most tokens of a prompt and its completion together; 0 if unknown."""
    advantages: Advantages | None = None
    """Computes the advantages of a batch; None: the built-in function that ``algorithm.advantages`` names."""
    player: EpisodePlayer | None = None
    """Plays episodes of the environment; None if a completion of the prompt is all that is judged."""
