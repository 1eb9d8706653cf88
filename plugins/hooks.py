"""Hook specifications (pluggy), and what calls the observers of a process."""

from __future__ import annotations

import inspect
import logging
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import pluggy

from .disabled_plugins import HookReport, record

PROJECT = "weightlane"

hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)

Facts = Mapping[str, Any]
"""JSON-representable facts about an event; keys carry their unit (``_s``, ``_bytes``, or are one: ``seconds``, ``nbytes``)."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Implementation:
    """One plugin's function for one hook, and which of the hook's arguments it takes."""

    plugin: str
    function: Callable[..., object]
    takes: tuple[str, ...]


class RunHooks:
    """The points at which weightlane calls its observers: each method is a specification, and calls those who implement it.

    A hook is called when its event has ended; ``facts["seconds"]`` says how long it took, where it took time. It is called by
    keyword, on whatever thread the event ended, possibly on several at once, in the process that its docstring names:

    - *driver*: runs the coordinator, and the training loop where there is one
    - *trainer rank*: runs a publisher
    - *rollout rank*: runs a subscriber; with vLLM a worker process
    - *replica*: takes a replica's requests; with vLLM the process that owns the engine, or the server

    Observers watch, they do not steer: return values are ignored, and one that raises an `Exception` is reported once and not
    called again in this process, while the others are. An observer must not block: the event's own thread waits for it. It may
    implement any subset, and take any subset of a hook's arguments. Facts may gain keys.

    Observers are called in pluggy's order: the one registered last comes first, but for ``tryfirst`` and ``trylast``.
    """

    def __init__(self) -> None:
        self._manager = pluggy.PluginManager(PROJECT)
        self._manager.add_hookspecs(RunHooks)
        self._lock = threading.Lock()
        self._implementations: dict[str, tuple[_Implementation, ...]] = {}
        self._reports: list[HookReport] = []

    # -- the run: driver ------------------------------------------------------------------------------------------------

    @hookspec
    def run_started(self, facts: Facts) -> None:
        """Every participant is connected and the first version serves. Called by the driver.

        Facts: ``step`` (optimizer steps taken before), ``steps`` (to be reached).
        """
        self._call("run_started", facts=facts)

    @hookspec
    def training_step(self, step: int, facts: Facts) -> None:
        """All trainer ranks took optimizer step `step`. Called by the driver.

        Facts: ``seconds`` (forward, backward, fence and optimizer, slowest rank), ``fence_s`` (of it, waiting for a
        snapshot), ``waited_for_rollouts_s`` (before it), ``reward`` (mean of the batch), ``staleness_mean`` and ``staleness_max``
        (versions), ``grad_norm``, ``tokens`` (of the batch); since the start ``tokens_per_s`` (generated), ``dropped_groups``,
        ``failed_items``, ``length_ratio`` (mean length of what was trained to that of what was drawn), ``overlap_share``; the
        metrics of the loss; ``rollout_blocked_s`` (longest time any replica generated nothing, of the versions that have come
        to serve since the step before); in the first step after a publication ``published_version`` and ``trainer_blocked_s``
        (publish plus fence of that version); once it is known ``blocking_way_s`` (what either side would have lost if it had
        waited for the version: see ``loop.blocking_syncs``).
        """
        self._call("training_step", step=step, facts=facts)

    @hookspec
    def evaluated(self, step: int, facts: Facts) -> None:
        """Held-out tasks were answered by the version of `step`. Called by the driver.

        Beside the training, newer versions may have answered some of them. Facts: ``accuracy``, ``tasks`` (that could be judged),
        ``failed`` (the others), ``version_min`` and ``version_max`` (that answered), ``seconds``.
        """
        self._call("evaluated", step=step, facts=facts)

    @hookspec
    def samples_trained(self, step: int, facts: Facts) -> None:
        """Some of the completions that optimizer step `step` used. Called by the driver.

        Facts: ``samples``, each with ``prompt``, ``completion`` (texts), ``reward`` and ``versions`` (that generated its tokens).
        """
        self._call("samples_trained", step=step, facts=facts)

    @hookspec
    def item_failed(self, kind: str, facts: Facts) -> None:
        """Samples, or an optimizer step, are left out of the run, which goes on without. Called by the driver.

        `kind` is ``prompt`` (too long), ``request`` (could not be answered), ``reward`` (could not be judged) or ``step`` (its
        gradient is not finite: no parameter changed). Facts: ``error`` (its text), ``count`` (samples, or 1 for a step); of
        samples ``task`` (the prompt) and ``place`` (file and line), ``replica`` but for prompts, ``completion`` (the text) for
        rewards; of a step ``step`` and ``tasks`` (its prompts).
        """
        self._call("item_failed", kind=kind, facts=facts)

    @hookspec
    def run_ended(self, facts: Facts) -> None:
        """The run is over. Called by the driver.

        Facts: the summary (the keys of ``summary.json``) of a run that ended well, else ``error``.
        """
        self._call("run_ended", facts=facts)

    # -- a version's life, as the coordinator sees it: driver ------------------------------------------------------------

    @hookspec
    def version_opened(self, version: int, facts: Facts) -> None:
        """The coordinator begins to carry `version`; ``version_committed`` or ``version_aborted`` follows. Called by the driver.

        Facts: ``replicas`` (names of those that take part).
        """
        self._call("version_opened", version=version, facts=facts)

    @hookspec
    def version_committed(self, version: int, facts: Facts) -> None:
        """Enough replicas serve `version`. Called by the driver.

        Facts: ``seconds`` and ``latency_s`` (from the start of the sync until the last replica served it),
        ``rollout_blocked_s`` (longest time any replica generated nothing), ``sent_bytes``, where weights travel quantised
        ``quantisation_error`` (root mean square of the error over that of the weights, of a sample), ``failures`` (of
        earlier attempts: ``session``, ``error``, ``excluded``), ``replicas``
        (by name ``outcome``, ``blocked_s``, ``staged_s``, ``nbytes``).
        """
        self._call("version_committed", version=version, facts=facts)

    @hookspec
    def version_aborted(self, version: int, facts: Facts) -> None:
        """`version` was given up; the one before goes on serving. Called by the driver.

        Facts: ``error`` (its text), ``seconds`` (since the sync began), ``failures`` (as for `version_committed`).
        """
        self._call("version_aborted", version=version, facts=facts)

    @hookspec
    def replica_quarantined(self, replica: str, facts: Facts) -> None:
        """`replica` gets no traffic until a complete version has committed on it. Called by the driver.

        Facts: ``version`` (that it failed to take), ``error`` (its text).
        """
        self._call("replica_quarantined", replica=replica, facts=facts)

    @hookspec
    def replica_lost(self, replica: str, facts: Facts) -> None:
        """`replica` died, or could not start in the place of one that did; the loop goes on without it. Called by the driver.

        Facts: ``error`` (its text), ``left`` (replicas), ``needed`` (fewer end the run), ``successor`` (name of the replica that
        is being started in its place; empty if there is none).
        """
        self._call("replica_lost", replica=replica, facts=facts)

    @hookspec
    def replica_joined(self, replica: str, facts: Facts) -> None:
        """`replica` took the place of one that died, and serves. Called by the driver.

        Facts: ``instead_of`` (the dead replica's name), ``version`` (that it serves), ``seconds`` (since the death).
        """
        self._call("replica_joined", replica=replica, facts=facts)

    # -- on the way: trainer ranks ----------------------------------------------------------------------------------------

    @hookspec
    def rank_stepped(self, rank: int, step: int, facts: Facts) -> None:
        """Trainer rank `rank` took optimizer step `step`. Called by every trainer rank.

        Facts: ``seconds``, and what it consists of: ``forward_backward_s`` (gradient clipping included), ``fence_s`` (waiting for
        a snapshot), ``optimizer_s``; ``participant``.
        """
        self._call("rank_stepped", rank=rank, step=step, facts=facts)

    @hookspec
    def snapshot_taken(self, version: int, facts: Facts) -> None:
        """A rank's shards were copied: its parameters may change. Called by every trainer rank.

        Facts: ``seconds``, ``nbytes``, ``participant`` (its name).
        """
        self._call("snapshot_taken", version=version, facts=facts)

    @hookspec
    def bucket_sent(self, version: int, index: int, facts: Facts) -> None:
        """The engine sent bucket `index` to every receiver. Called by the trainer rank or relay that sends.

        Facts: ``seconds`` (in the engine), ``nbytes``, ``participant``, and from a rollout rank ``relayed`` (true).
        """
        self._call("bucket_sent", version=version, index=index, facts=facts)

    # -- on the way: rollout ranks and replicas -----------------------------------------------------------------------------

    @hookspec
    def bucket_received(self, version: int, index: int, facts: Facts) -> None:
        """Bucket `index` came and its checksum holds. Called by every rollout rank.

        Facts: ``seconds`` (waiting included), ``nbytes``, ``participant``.
        """
        self._call("bucket_received", version=version, index=index, facts=facts)

    @hookspec
    def version_staged(self, version: int, facts: Facts) -> None:
        """Every byte of `version` lies ready, nothing of it is in use. Called by every rollout rank.

        Facts: ``seconds`` (from the first byte asked for to the last one verified), ``nbytes``, ``participant``.
        """
        self._call("version_staged", version=version, facts=facts)

    @hookspec
    def replica_committed(self, replica: str, version: int, facts: Facts) -> None:
        """`replica` took `version` between two decode steps. Called by the replica.

        Facts: ``seconds`` (from the call until requests in flight had their next token), ``waited_s`` (its first part, until the
        engine took the call), ``blocked_s`` (the next part, in which no decode step began), ``load_s`` (of that, replacing
        weights), ``in_flight`` (requests that were generating), ``max_token_gap_s`` (longest wait for a next token that spans the
        commit).
        """
        self._call("replica_committed", replica=replica, version=version, facts=facts)

    @hookspec
    def generation_finished(self, facts: Facts) -> None:
        """A request was answered, well. Called by the replica.

        Facts: ``replica``, ``request`` (the caller's id), ``tokens`` (generated), ``prompt_tokens``, ``seconds``,
        ``version_min`` and ``version_max`` (oldest and newest version that generated one of its tokens), ``finish_reason``
        (``stop`` or ``length``).
        """
        self._call("generation_finished", facts=facts)

    # -- observers --------------------------------------------------------------------------------------------------------

    def register(self, observer: object, name: str = "") -> bool:
        """Call `observer` from now on; reports, and returns False, if it cannot be: see `reports`."""
        name = self._unused(name or f"{type(observer).__module__}.{type(observer).__qualname__}")
        with self._lock:
            try:
                self._manager.register(observer, name)
            except Exception as error:  # noqa: BLE001 - pluggy looks at every attribute of a third party's object
                self._forget(name)
                refused: Exception | None = error
            else:
                refused = self._unsuitable(name, observer)
                if refused is not None:
                    self._forget(name)
            self._collect()
        if refused is not None:
            self.report(name, "", refused)
        return refused is None

    def report(self, plugin: str, hook: str, error: Exception) -> None:
        """Tell the user, in the log and in `reports`, that `plugin` is not called any more, or not at all."""
        report = HookReport(plugin, hook, f"{type(error).__name__}: {error}")
        with self._lock:
            self._reports.append(report)
        record(report, error)

    @property
    def reports(self) -> tuple[HookReport, ...]:
        """Which observers were disabled in this process, and why."""
        with self._lock:
            return tuple(self._reports)

    def _call(self, hook: str, **arguments: Any) -> None:
        # Hooks of single buckets come here too: with nobody listening this must cost next to nothing.
        for implementation in self._implementations.get(hook, ()):
            try:
                implementation.function(*[arguments[name] for name in implementation.takes])
            except Exception as error:  # noqa: BLE001 - third-party code must not break a sync or a run
                self._disable(implementation.plugin, hook, error)

    def _disable(self, plugin: str, hook: str, error: Exception) -> None:
        with self._lock:
            if not self._manager.has_plugin(plugin):
                return  # another thread was faster
            self._forget(plugin)
            self._collect()
        self.report(plugin, hook, error)

    def _forget(self, plugin: str) -> None:
        if self._manager.has_plugin(plugin):
            self._manager.unregister(name=plugin)

    def _collect(self) -> None:
        """Callers read the mapping without the lock, so it is replaced, never changed."""
        found: dict[str, tuple[_Implementation, ...]] = {}
        for hook in HOOK_NAMES:
            caller: pluggy.HookCaller = getattr(self._manager.hook, hook)
            if implementations := caller.get_hookimpls():
                found[hook] = tuple(
                    _Implementation(item.plugin_name, item.function, tuple(item.argnames))
                    for item in reversed(implementations)
                )
        self._implementations = found

    def _unsuitable(self, plugin: str, observer: object) -> Exception | None:
        """Why an observer that pluggy took cannot be called; a hook that does not exist here is only pointed out."""
        for caller in self._manager.get_hookcallers(observer) or []:
            for item in caller.get_hookimpls():
                if item.plugin_name != plugin:
                    continue
                function = item.function
                if item.wrapper or item.hookwrapper:
                    return TypeError(f"{caller.name} is a wrapper; observers watch, they do not steer")
                if inspect.iscoroutinefunction(function) or inspect.isgeneratorfunction(function):
                    return TypeError(f"{caller.name} must be a plain function, neither async nor a generator")
                if caller.name not in HOOK_NAMES and not item.optionalhook:
                    _log.warning("plugin %s implements %s, which this weightlane does not call", plugin, caller.name)
        return None

    def _unused(self, name: str) -> str:
        with self._lock:
            number, unused = 1, name
            while self._manager.has_plugin(unused):
                number += 1
                unused = f"{name} #{number}"
        return unused


HOOK_NAMES = tuple(name for name, value in vars(RunHooks).items() if hasattr(value, f"{PROJECT}_spec"))
"""Every hook, in the order of its specification."""
