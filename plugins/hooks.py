"""`RunHooks`: the hook specifications (pluggy), and the calls of a process's observers."""

from __future__ import annotations

import inspect
import logging
import threading
from collections.abc import Mapping
from typing import Any

import pluggy

from .disabled_plugins import HookReport, record

PROJECT = "weightlane"

hookspec = pluggy.HookspecMarker(PROJECT)
hookimpl = pluggy.HookimplMarker(PROJECT)

Facts = Mapping[str, Any]
"""Facts about an event, which JSON can represent. A key ends with its unit (``_s``, ``_bytes``) or is a unit (``seconds``)."""

_log = logging.getLogger(__name__)


class RunHooks:
    """The hooks of weightlane. Each method specifies a hook, and calls the observers that implement it.

    A hook is called after its event; ``facts["seconds"]`` is the duration of an event that takes time. The calls happen on the
    event's thread, possibly on several threads at once, in the process that the hook's docstring names:

    - *driver*: runs the coordinator, and the training loop if there is one
    - *trainer rank*: runs a publisher
    - *rollout rank*: runs a subscriber; with vLLM a worker process
    - *replica*: takes a replica's requests; with vLLM the process that owns the engine

    Observers cannot change what weightlane does: return values are ignored. An observer that raises an `Exception` is reported
    once and not called again in this process; the other observers are. An observer must not block, because the event's thread
    waits for it. It may implement any subset of the hooks, and take any subset of a hook's arguments. Later versions may add
    facts.

    Observers are called in pluggy's order: the last registered one first, except for ``tryfirst`` and ``trylast``.
    """

    def __init__(self) -> None:
        self._manager = pluggy.PluginManager(PROJECT)
        self._manager.add_hookspecs(RunHooks)
        self._lock = threading.Lock()
        self._implementations: Mapping[str, tuple[pluggy.HookImpl, ...]] = {}
        self._reports: list[HookReport] = []

    # -- the run: driver ------------------------------------------------------------------------------------------------

    @hookspec
    def run_started(self, facts: Facts) -> None:
        """Every participant is connected and the first version serves. Called by the driver.

        Facts: ``step`` (optimizer steps taken before), ``steps`` (optimizer steps of the entire run).
        """
        self._call("run_started", facts=facts)

    @hookspec
    def training_step(self, step: int, facts: Facts) -> None:
        """All trainer ranks were trained on the batch of step `step`. Called by the driver.

        Facts: ``seconds`` (forward, backward, fence and optimizer on the slowest rank), ``fence_s`` (the part that waited for a
        snapshot), ``waited_for_rollouts_s`` (before the step), ``reward`` (mean of the batch), ``staleness_mean`` and
        ``staleness_max`` (versions), ``grad_norm``, ``optimizer_steps`` (so far), ``tokens`` (of the batch), and the metrics of
        the loss. ``rollout_blocked_s`` is the longest time that a replica generated nothing, over the versions committed since
        the previous step.

        Of the groups whose turn came since the previous step: ``groups_drawn``, ``groups_without_signal`` (equal rewards), of
        these ``groups_all_right`` and ``groups_all_wrong``, ``groups_refilled`` (replaced by others), ``completions_drawn``,
        ``successes_drawn`` (rewards above 0), ``reward_drawn`` (mean), ``overlong_completions`` (cut off at max_new_tokens).

        With an environment, means of the step's episodes: ``turns``, ``read_between_turns`` (tokens), ``full`` and
        ``out_of_turns`` (shares cut short), ``prefix_reuse`` (share of earlier turns' tokens found in the engine's cache), and
        ``environment/NAME``.

        Since the start of the run: ``tokens_per_s`` (generated), ``dropped_groups``, ``failed_items``, ``length_ratio`` (mean
        length of trained completions over that of drawn ones), ``overlap_share``.

        In the first step after a publication: ``published_version``, ``trainer_blocked_s`` (publish plus fence of that version).
        When it is known: ``synchronous_update_s`` (time that either side would lose in a synchronous update, see
        ``loop.blocking_syncs``).

        Of ``weightlane sft``: ``epoch`` (passes over the examples so far), ``seconds``, ``grad_norm``, ``tokens``,
        ``tokens_per_s`` (read by the model), ``failed_items``, and the metrics of the loss.
        """
        self._call("training_step", step=step, facts=facts)

    @hookspec
    def evaluated(self, step: int, facts: Facts) -> None:
        """The version of `step` answered the held-out tasks. Called by the driver.

        Newer versions may have answered some of them, because training continues meanwhile. Facts: ``accuracy`` (mean greedy
        reward); with ``loop.evaluate_samples`` ``pass_at_1``, ``pass_at_2``, ``pass_at_4`` and so on; with several sets each of
        these also as, for example, ``accuracy_NAME``, beside the mean over the sets; ``tasks`` (those judged), ``failed`` (the
        others), ``version_min`` and ``version_max`` (versions that answered), ``seconds``. Of
        ``weightlane sft``: ``mean_logprob`` (of a held-out target, in nats), ``tasks`` (examples), ``failed`` (0), ``seconds``.
        """
        self._call("evaluated", step=step, facts=facts)

    @hookspec
    def samples_trained(self, step: int, facts: Facts) -> None:
        """Optimizer step `step` was trained on completions; some of them are reported. Called by the driver.

        Facts: ``samples``, each with ``prompt``, ``completion`` (texts), ``reward`` and ``versions``: of every token, in order,
        as pairs of a version and the number of tokens in a row that it generated. Of episodes also ``turns`` and ``ended``.
        """
        self._call("samples_trained", step=step, facts=facts)

    @hookspec
    def item_failed(self, kind: str, facts: Facts) -> None:
        """Samples or an optimizer step failed, and the run continues without them. Called by the driver.

        `kind` is ``prompt`` (too long), ``request`` (not answered), ``reward`` (not judged), ``environment`` (it failed) or
        ``step`` (the gradient is not finite, and no parameter changed). Facts: ``error`` (its text), ``count`` (samples, or 1
        for a step). Facts of samples: ``task`` (the prompt), ``place`` (file and line), ``replica`` where there is one,
        ``completion`` (the text) for the rewards of single turns, ``turns`` (so far) for episodes. Facts of a step: ``step``,
        ``tasks`` (its prompts).
        """
        self._call("item_failed", kind=kind, facts=facts)

    @hookspec
    def run_ended(self, facts: Facts) -> None:
        """The run has ended. Called by the driver.

        Facts: the summary (the keys of ``summary.json``) if the run succeeded, else ``error``.
        """
        self._call("run_ended", facts=facts)

    @hookspec
    def job_finished(self, kind: str, facts: Facts) -> None:
        """A job of the runner has succeeded or failed. Called by the driver.

        `kind` is the kind of the job, such as ``rl_step`` or ``publish``. Facts: ``seconds`` (of execution), ``waited_s`` (for
        earlier jobs), ``tokens`` (of its batch), ``adapter`` (its name; empty if there is none), ``error`` (its text; empty if
        the job succeeded).
        """
        self._call("job_finished", kind=kind, facts=facts)

    # -- versions in the coordinator: driver -------------------------------------------------------------------------------

    @hookspec
    def version_opened(self, version: int, facts: Facts) -> None:
        """The coordinator starts to sync `version`. ``version_committed`` or ``version_aborted`` follows. Called by the driver.

        Facts: ``replicas`` (names of the participating ones).
        """
        self._call("version_opened", version=version, facts=facts)

    @hookspec
    def version_committed(self, version: int, facts: Facts) -> None:
        """Enough replicas serve `version`. Called by the driver.

        Facts: ``seconds`` and ``latency_s`` (from the start of the sync until the last replica served the version),
        of which: ``export_s`` (slowest trainer rank's snapshot), ``transfer_s`` (slowest replica's receipt and check),
        ``install_s`` (longest commit), ``rollout_blocked_s`` (longest time that a replica generated nothing),
        ``recomputed_tokens`` (that requests in flight prefill again), ``sent_bytes``, ``failures`` (of earlier
        attempts: ``session``, ``error``, ``excluded``), ``replicas`` (by name ``outcome``, ``blocked_s``, ``staged_s``,
        ``nbytes``, ``install_s``, ``recomputed_tokens``). For quantised weights ``quantisation_error`` (root mean
        square of the error over that of the weights, of a sample).
        """
        self._call("version_committed", version=version, facts=facts)

    @hookspec
    def version_aborted(self, version: int, facts: Facts) -> None:
        """`version` was aborted, and the previous one still serves. Called by the driver.

        Facts: ``error`` (its text), ``seconds`` (since the start of the sync), ``failures`` (as for `version_committed`).
        """
        self._call("version_aborted", version=version, facts=facts)

    @hookspec
    def replica_quarantined(self, replica: str, facts: Facts) -> None:
        """`replica` gets no traffic until a complete version has committed on it. Called by the driver.

        Facts: ``version`` (the failed one), ``error`` (its text).
        """
        self._call("replica_quarantined", replica=replica, facts=facts)

    @hookspec
    def replica_lost(self, replica: str, facts: Facts) -> None:
        """`replica` died, or could not replace a dead one, and the loop continues without it. Called by the driver.

        Facts: ``error`` (its text), ``left`` (remaining replicas), ``needed`` (fewer end the run), ``successor`` (name of the
        replica that starts to replace it; empty if there is none).
        """
        self._call("replica_lost", replica=replica, facts=facts)

    @hookspec
    def replica_joined(self, replica: str, facts: Facts) -> None:
        """`replica` has started during the run, and serves. Called by the driver.

        Facts: ``instead_of`` (name of the dead replica that it replaces; empty if there are more replicas now), ``version`` (the
        served one), ``seconds`` (since the death, or since the run was scaled).
        """
        self._call("replica_joined", replica=replica, facts=facts)

    @hookspec
    def replica_left(self, replica: str, facts: Facts) -> None:
        """`replica` has left because the run was scaled, and its processes have ended. Called by the driver.

        Facts: ``seconds`` (since the run was scaled), ``handed_over`` (number of groups that it did not finish, which others
        generate again), ``error`` (text of its death, if it died meanwhile), ``replicas`` (number of those that are left).
        """
        self._call("replica_left", replica=replica, facts=facts)

    @hookspec
    def turn_ended(self, turn: str, facts: Facts) -> None:
        """A `turn` on devices that trainers and rollouts share ended: ``generation``, ``training`` or ``sync``.

        Called by the driver.

        Facts: by process, ``held_bytes`` (once it has freed what only this turn needs), ``peak_bytes`` (since the turn before).
        """
        self._call("turn_ended", turn=turn, facts=facts)

    # -- trainer ranks ----------------------------------------------------------------------------------------------------

    @hookspec
    def rank_stepped(self, rank: int, step: int, facts: Facts) -> None:
        """Trainer rank `rank` took optimizer step `step`. Called by every trainer rank.

        Facts: ``role`` (whose model it trained), ``seconds`` and its parts ``forward_backward_s`` (with gradient clipping),
        ``fence_s`` (waiting for a snapshot) and ``optimizer_s``; ``participant`` (the rank's name).
        """
        self._call("rank_stepped", rank=rank, step=step, facts=facts)

    @hookspec
    def outputs_computed(self, rank: int, facts: Facts) -> None:
        """Rank `rank` computed outputs of a batch without gradient. Called by every trainer rank.

        Facts: ``role`` (whose model computed), ``seconds``, ``participant`` (the rank's name).
        """
        self._call("outputs_computed", rank=rank, facts=facts)

    @hookspec
    def snapshot_taken(self, version: int, facts: Facts) -> None:
        """A rank's shards were copied, so its parameters may change. Called by every trainer rank.

        Facts: ``seconds``, ``nbytes``, ``participant`` (the rank's name).
        """
        self._call("snapshot_taken", version=version, facts=facts)

    @hookspec
    def bucket_sent(self, version: int, index: int, facts: Facts) -> None:
        """The engine sent bucket `index` to every receiver. Called by the trainer rank or relay that sends.

        Facts: ``seconds`` (in the engine), ``nbytes``, ``participant``, and ``relayed`` (true) on a rollout rank.
        """
        self._call("bucket_sent", version=version, index=index, facts=facts)

    # -- rollout ranks and replicas ---------------------------------------------------------------------------------------

    @hookspec
    def bucket_received(self, version: int, index: int, facts: Facts) -> None:
        """Bucket `index` arrived and passed its checksum. Called by every rollout rank.

        Facts: ``seconds`` (with waiting), ``nbytes``, ``participant``.
        """
        self._call("bucket_received", version=version, index=index, facts=facts)

    @hookspec
    def version_staged(self, version: int, facts: Facts) -> None:
        """`version` is staged: complete, verified, and not in use. Called by every rollout rank.

        Facts: ``seconds`` (from the request for the first byte until the last one was verified), ``nbytes``, ``participant``.
        """
        self._call("version_staged", version=version, facts=facts)

    @hookspec
    def replica_committed(self, replica: str, version: int, facts: Facts) -> None:
        """`replica` committed `version` between two decode steps. Called by the replica.

        Facts: ``seconds`` (from the call until running requests had their next token), ``waited_s`` (its first part, until the
        engine took the call), ``blocked_s`` (its next part, in which no decode step started), ``load_s`` (replacing weights, a
        part of the blocked time), ``in_flight`` (running requests), ``recomputed_tokens`` (of theirs, which prefill again),
        ``max_token_gap_s`` (longest wait for a token across the commit).
        """
        self._call("replica_committed", replica=replica, version=version, facts=facts)

    @hookspec
    def generation_finished(self, facts: Facts) -> None:
        """A request was answered without an error. Called by the replica.

        Facts: ``replica``, ``request`` (the caller's id), ``tokens`` (generated), ``prompt_tokens``, ``seconds``,
        ``version_min`` and ``version_max`` (oldest and newest version that generated a token), ``finish_reason`` (``stop`` or
        ``length``).
        """
        self._call("generation_finished", facts=facts)

    # -- observers --------------------------------------------------------------------------------------------------------

    def register(self, observer: object, name: str = "") -> bool:
        """Call `observer` from now on. If it cannot be called, report that (see `reports`) and return False."""
        name = self._unused(name or f"{type(observer).__module__}.{type(observer).__qualname__}")
        with self._lock:
            try:
                self._manager.register(observer, name)
            except Exception as error:  # noqa: BLE001 - pluggy reads every attribute of a third-party object
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
        """Report in the log and in `reports` that `plugin` was disabled, or could not be loaded."""
        report = HookReport(plugin, hook, f"{type(error).__name__}: {error}")
        with self._lock:
            self._reports.append(report)
        record(report, error)

    @property
    def reports(self) -> tuple[HookReport, ...]:
        """The observers that were disabled in this process or could not be loaded, with the reasons."""
        with self._lock:
            return tuple(self._reports)

    def _call(self, hook: str, **arguments: Any) -> None:
        # Every bucket calls hooks, so this must be fast without observers.
        for implementation in self._implementations.get(hook, ()):
            try:
                implementation.function(*[arguments[name] for name in implementation.argnames])
            except Exception as error:  # noqa: BLE001 - third-party code must not break a sync or a run
                self._disable(implementation.plugin_name, hook, error)

    def _disable(self, plugin: str, hook: str, error: Exception) -> None:
        with self._lock:
            if not self._manager.has_plugin(plugin):
                return  # another thread has disabled it
            self._forget(plugin)
            self._collect()
        self.report(plugin, hook, error)

    def _forget(self, plugin: str) -> None:
        if self._manager.has_plugin(plugin):
            self._manager.unregister(name=plugin)

    def _collect(self) -> None:
        """Replace `_implementations`, the mapping that callers read without the lock."""
        callers = {hook: getattr(self._manager.hook, hook) for hook in HOOK_NAMES}
        self._implementations = {hook: tuple(reversed(caller.get_hookimpls())) for hook, caller in callers.items()}

    def _unsuitable(self, plugin: str, observer: object) -> Exception | None:
        """Return why a registered observer cannot be called, or None. An unknown hook is only logged."""
        for caller in self._manager.get_hookcallers(observer) or []:
            for item in caller.get_hookimpls():
                if item.plugin_name != plugin:
                    continue
                function = item.function
                if item.wrapper or item.hookwrapper:
                    return TypeError(f"{caller.name} is a hook wrapper, which could change what weightlane does")
                if inspect.iscoroutinefunction(function) or inspect.isgeneratorfunction(function):
                    return TypeError(f"{caller.name} must be a plain function, neither async nor a generator")
                if caller.name not in HOOK_NAMES and not item.optionalhook:
                    _log.warning("plugin %s implements %s, which is no hook of this weightlane", plugin, caller.name)
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
