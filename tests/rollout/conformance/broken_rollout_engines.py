"""Rollout engines that are wrong in one way each: `transformers` with one planted fault."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, TypeVar

import torch

from weightlane.ckpt_engines import ConfigError, WeightlaneError
from weightlane.rollout import engine_toolkit as toolkit
from weightlane.rollout.engines.transformers.engine import TransformersEngine

Engine = TypeVar("Engine", bound=type[TransformersEngine])
Arrived = Callable[[int], None]

DEFECTS: dict[str, tuple[str, str]] = {}
"""Engine to the check that catches it, with its model or case, and a pattern for its error."""


def caught_by(check: str, complaint: str) -> Callable[[Engine], Engine]:
    """Decorates each engine. `check` may name a model or case in brackets."""

    def note(engine: Engine) -> Engine:
        DEFECTS[engine.__name__] = f"test_{check}", complaint
        return engine

    return note


class Altered(TransformersEngine):
    """Sees every request before it is generated, and every completion before it is returned."""

    def request(self, request: toolkit.GenerationRequest) -> toolkit.GenerationRequest:
        return request

    def answer(self, completion: toolkit.Completion, request: toolkit.GenerationRequest) -> toolkit.Completion:
        return completion

    async def generate(self, request: toolkit.GenerationRequest, arrived: Arrived) -> toolkit.Completion:
        return self.answer(await super().generate(self.request(request), arrived), request)


class Resampled(Altered):
    """Changes how tokens are sampled."""

    def sampling(self, sampling: toolkit.Sampling) -> toolkit.Sampling:
        raise NotImplementedError

    def request(self, request: toolkit.GenerationRequest) -> toolkit.GenerationRequest:
        return replace(request, sampling=self.sampling(request.sampling))


@caught_by("a_started_engine_serves_its_checkpoint_and_then_a_version[gpt-neox]", "vocab_size to be")
class PadsItsVocabulary(TransformersEngine):
    """The vocabulary is that of the padded embedding."""

    async def start(self, version: int) -> None:
        await super().start(version)
        self.vocab_size = -(-self.vocab_size // 64) * 64


@caught_by("a_completion_ends_where_it_is_told", "tokens and 'stop' of stop token .* 'length'")
class ForgetsStopTokens(Resampled):
    """Only the first stop token counts, in the order of their numbers."""

    def sampling(self, sampling: toolkit.Sampling) -> toolkit.Sampling:
        return replace(sampling, stop_ids=sorted(sampling.stop_ids)[:1])


@caught_by(
    "sampled_tokens_have_the_log_probability_of_their_distribution[temperature]", "log-probabilities with .* off"
)
class ScoresWithoutTemperature(Altered):
    """Log-probabilities are the model's own, whatever a token was drawn from."""

    def answer(self, completion: toolkit.Completion, request: toolkit.GenerationRequest) -> toolkit.Completion:
        ids = torch.tensor([[*request.prompt_ids, *completion.token_ids]])
        with torch.no_grad():
            logprobs = self._model(ids).logits[0].log_softmax(-1)[len(request.prompt_ids) - 1 : -1]
        return replace(
            completion, logprobs=logprobs.gather(1, torch.tensor(completion.token_ids)[:, None])[:, 0].tolist()
        )


@caught_by("tokens_are_drawn_from_the_distribution", "draws differ")
class DrawsOnce(Altered):
    """Every completion of one token begins with the same random numbers."""

    def request(self, request: toolkit.GenerationRequest) -> toolkit.GenerationRequest:
        fixed = request.sampling.max_new_tokens == 1
        return replace(request, sampling=replace(request.sampling, seed=0)) if fixed else request


@caught_by("a_seed_repeats_a_completion", "seed 7 to give")
class SharesOneRandomState(Resampled):
    """Requests that run together continue one another's random numbers."""

    _drawn = 0

    def sampling(self, sampling: toolkit.Sampling) -> toolkit.Sampling:
        self._drawn += 1
        return replace(sampling, seed=self._drawn)


@caught_by("prompts_and_the_most_probable_tokens_have_log_probabilities", "scores of the prompt, got")
class ScoresHalfThePrompt(Altered):
    """A prompt that was seen before is scored from its middle on."""

    def answer(self, completion: toolkit.Completion, request: toolkit.GenerationRequest) -> toolkit.Completion:
        scores = completion.prompt_logprobs
        return replace(completion, prompt_logprobs=scores and scores[: len(scores) // 2])


@caught_by("many_requests_at_once_are_decoded_as_each_alone", "the answer to request")
class MixesUpAnswers(Altered):
    """The answer is named like the request before it."""

    _before = ""

    def answer(self, completion: toolkit.Completion, request: toolkit.GenerationRequest) -> toolkit.Completion:
        name, self._before = self._before, request.request_id
        return replace(completion, request_id=name)


@caught_by("a_bad_request_is_refused_and_ends_nothing_else", "ConfigError from top_p 0, it ")
class TakesAnyTopP(Resampled):
    """A `top_p` that is none counts as 1."""

    def sampling(self, sampling: toolkit.Sampling) -> toolkit.Sampling:
        return replace(sampling, top_p=sampling.top_p if 0 < sampling.top_p <= 1 else 1.0)


@caught_by("stop_strings_without_a_tokenizer_are_refused", "ConfigError from a request with stop strings, it ")
class IgnoresStopStrings(Resampled):
    """Stop strings are left out."""

    def sampling(self, sampling: toolkit.Sampling) -> toolkit.Sampling:
        return replace(sampling, stop_strings=())


@caught_by("requests_in_flight_switch_models_where_their_stamps_switch", "to be .*, as transformers with version")
class KeepsCaches(TransformersEngine):
    """Caches of requests in flight are kept, whatever was asked for."""

    def _put_into_service(self, model: Any) -> None:
        config, self.config = self.config, self.config.model_copy(update={"kv_on_commit": "keep"})
        super()._put_into_service(model)
        self.config = config


@caught_by("several_commits_in_a_row_are_each_stamped", "to be .*, as transformers with version")
class StampsTheEnd(Altered):
    """Every token is stamped with the version that serves when its completion ends."""

    def answer(self, completion: toolkit.Completion, request: toolkit.GenerationRequest) -> toolkit.Completion:
        return replace(completion, versions=[self._version] * len(completion.versions))


@caught_by("no_cache_serves_older_weights", "to be .*, as transformers with version")
class AnswersFromMemory(Altered):
    """A long prompt that was seen before gets the tokens of then."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._known: dict[tuple[int, ...], toolkit.Completion] = {}

    def answer(self, completion: toolkit.Completion, request: toolkit.GenerationRequest) -> toolkit.Completion:
        known = self._known.setdefault(tuple(request.prompt_ids), completion)
        return replace(known, versions=completion.versions)


@caught_by("caches_are_kept_where_that_is_declared", "of a completion before a commit")
class StampsLateWithKeptCaches(Altered):
    """Where caches are kept, the first tokens of a new model are stamped with the version before."""

    def answer(self, completion: toolkit.Completion, request: toolkit.GenerationRequest) -> toolkit.Completion:
        old, *_, new = completion.versions
        switch = completion.versions.count(old)
        if self.config.kv_on_commit == "recompute" or old == new:
            return completion
        late = [*completion.versions[:switch], *[old] * 4, *completion.versions[switch + 4 :]]
        return replace(completion, versions=late[: len(completion.versions)])


@caught_by("commits_are_in_place_where_that_is_declared", "in place")
class DeclaresTooMuch(TransformersEngine):
    """It says that it commits in place, and its loader cannot."""

    capabilities = replace(TransformersEngine.capabilities, commit_modes=frozenset({"staged", "in_place"}))


@caught_by("another_publisher_is_followed", "the completion after a connect to be .*, as transformers with version")
class BeginsAnewWithAPublisher(TransformersEngine):
    """A connect takes the weights of the checkpoint, whatever serves."""

    async def connect(self, fields: Mapping[str, Any]) -> None:
        await super().connect(fields)
        self._model = self._rank.updatable.loader.model


@caught_by("a_version_that_was_never_staged_changes_nothing", "a completion beside a commit that fails")
class ChangesBeforeItChecks(TransformersEngine):
    """A commit touches the weights before it knows whether it can be made."""

    async def update(self, fields: Mapping[str, Any], *, serves: int, trusted: bool) -> toolkit.UpdateFigures:
        with torch.no_grad():
            next(self._model.parameters()).mul_(1.001)
        return await super().update(fields, serves=serves, trusted=trusted)


@caught_by("a_version_of_another_shape_is_refused", "WeightlaneError from a version in which .* it returned")
class NeedsNoMatrix(TransformersEngine):
    """The first matrix of a version is not read, so that any shape will do: that of the checkpoint stays."""

    async def start(self, version: int) -> None:
        await super().start(version)
        loader = self._rank.updatable.loader
        tensors = dict(loader.expectation.tensors)
        unread = next(name for name, each in tensors.items() if len(each.shape) > 1)
        tensors.pop(unread)
        loader.expectation = replace(loader.expectation, tensors=tensors, unread=frozenset({unread}))
        write, kept = loader.write, loader.model.state_dict()[unread]
        loader.write = lambda version: write({**version, unread: kept})


@caught_by("a_version_that_another_replica_refuses_is_rolled_back", "version")
class CannotRollBack(TransformersEngine):
    """A rollback does nothing, and says that it was made."""

    async def update(self, fields: Mapping[str, Any], *, serves: int, trusted: bool) -> toolkit.UpdateFigures:
        if "rollback_of" in fields:
            return toolkit.UpdateFigures(0.0, 0.0)
        return await super().update(fields, serves=serves, trusted=trusted)


@caught_by("a_rollback_that_comes_too_late_changes_nothing", "CommitError from the rollback of version .*, it returned")
class RollsBackToNothing(TransformersEngine):
    """A rollback for which no version is kept succeeds."""

    async def update(self, fields: Mapping[str, Any], *, serves: int, trusted: bool) -> toolkit.UpdateFigures:
        try:
            return await super().update(fields, serves=serves, trusted=trusted)
        except WeightlaneError:
            if "rollback_of" in fields:
                return toolkit.UpdateFigures(0.0, 0.0)
            raise


@caught_by(
    "a_quarantined_replica_serves_again_after_the_next_version", "QuarantinedError from the failed commit of a quar"
)
class TrustsItself(TransformersEngine):
    """Weights that the replica does not trust are as good as others."""

    async def update(self, fields: Mapping[str, Any], *, serves: int, trusted: bool) -> toolkit.UpdateFigures:
        del trusted
        return await super().update(fields, serves=serves, trusted=True)


@caught_by(
    "a_directory_without_a_causal_language_model_is_refused",
    "ConfigError from the start from nowhere, it raised FileNotF",
)
class RaisesWhatComes(TransformersEngine):
    """An error of the file system is passed on."""

    async def start(self, version: int) -> None:
        if not list(self.model_dir.iterdir()):
            raise FileNotFoundError("no files")
        await super().start(version)


@caught_by("close_may_be_called_at_any_time_and_twice", "closed already")
class RaisesOnTheSecondClose(TransformersEngine):
    """An engine that is gone cannot be closed."""

    @property
    def open(self) -> bool:
        return True

    async def close(self) -> None:
        if self._rank is None:
            raise RuntimeError("closed already")
        await super().close()


@caught_by("a_closed_engine_leaves_nothing_behind", r"the process has .*\d+ threads instead of")
class LeavesAThread(TransformersEngine):
    """One for each engine, which nobody ends."""

    async def start(self, version: int) -> None:
        await super().start(version)
        threading.Thread(target=time.sleep, args=(3600,), daemon=True).start()


@caught_by("undeclared_settings_are_refused_before_the_start", "expected adapters to be taken")
class RefusesWhatItDeclares(TransformersEngine):
    """Adapters are declared, and refused all the same."""

    capabilities = replace(TransformersEngine.capabilities, adapters=True)

    def __init__(self, name: str, config: toolkit.RolloutConfig, model_dir: Any) -> None:
        super().__init__(name, config, model_dir)
        if config.adapter is not None:
            raise ConfigError("not yet.", part=name)
