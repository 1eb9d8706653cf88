"""The weight version of every token, for vLLM 0.28 to 0.31, whose completions do not say it; vLLM 0.32 does so by itself.

The engine core adds its weight version to each output of a decode step, among the output's trace headers, which nothing but
tracing reads. The version so travels with the tokens themselves, and no clock or order of messages decides. The client's process
collects the versions in the completions, as vLLM 0.32 does: ``completion.weight_versions`` are spans of ``version``, ``start``
and ``end``.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

from ..vllm_surface import CompletionOutput, EngineCore, uses_weightlane

_HEADER = "weightlane-weight-version"
_FIELD = "weight_versions"
_SPANS = "weightlane_spans"
"""The attribute of a request's state that has its spans so far; requests of engines without weightlane have none."""


@dataclasses.dataclass
class Span:
    """Tokens `start` up to, but without, `end` of a completion, which weights of `version` generated."""

    version: str
    start: int
    end: int


def install(field: str = _FIELD) -> None:
    """Give completions of engines that use weightlane a `field` with their spans, unless vLLM's completions have that field.

    Must be called in the engine core's process and in its client's, before the core is made.
    """
    if field in {known.name for known in dataclasses.fields(CompletionOutput)}:
        return
    # Imported here: a vLLM whose completions have the field may be without these.
    from ..vllm_surface import OutputProcessor, RequestState  # noqa: PLC0415

    for name in ("step", "step_with_batch_queue"):
        setattr(EngineCore, name, _stamping(getattr(EngineCore, name)))
    OutputProcessor.process_outputs = _collecting(OutputProcessor.process_outputs)
    RequestState._new_completion_output = _with_spans(RequestState._new_completion_output, field)


def _stamping(plain: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """A decode step that adds the version to its outputs. Commits change the version between two steps only."""

    @functools.wraps(plain)
    def step(core: Any) -> Any:
        outputs, executed = plain(core)
        if outputs and uses_weightlane(core.vllm_config):
            stamp = {_HEADER: core.get_weight_version()}
            for of_client in outputs.values():
                for output in of_client.outputs:
                    output.trace_headers = {**(output.trace_headers or {}), **stamp}
        return outputs, executed

    return step


def _collecting(plain: Callable[..., Any]) -> Callable[..., Any]:
    """`process_outputs` that extends the spans of each request by the tokens that it keeps of this step."""

    @functools.wraps(plain)
    def process_outputs(processor: Any, engine_core_outputs: Sequence[Any], *args: Any, **kwargs: Any) -> Any:
        stamped = []
        for output in engine_core_outputs:
            version = (output.trace_headers or {}).get(_HEADER)
            state = processor.request_states.get(output.request_id)
            if version is not None and state is not None and state.detokenizer is not None:
                vars(state).setdefault(_SPANS, [])
                stamped.append((state, version, state.detokenizer.num_output_tokens()))
        result = plain(processor, engine_core_outputs, *args, **kwargs)
        # Counted afterwards: tokens behind a stop string are dropped.
        for state, version, start in stamped:
            _extend(vars(state)[_SPANS], version, start, state.detokenizer.num_output_tokens())
        return result

    return process_outputs


def _extend(spans: list[Span], version: str, start: int, end: int) -> None:
    if spans and spans[-1].version == version and spans[-1].end == start:
        spans[-1].end = end
    elif end > start:
        # Where steps without a version lie between, spans do not cover all tokens, and the replica refuses them.
        spans.append(Span(version, start, end))


def _with_spans(plain: Callable[..., Any], field: str) -> Callable[..., Any]:
    """`_new_completion_output` whose results have the list of spans of their request, which grows with it.

    vLLM merges outputs that a client has not fetched yet into the first of them, which so has the later spans, too.
    """

    @functools.wraps(plain)
    def new_completion_output(state: Any, *args: Any, **kwargs: Any) -> Any:
        completion = plain(state, *args, **kwargs)
        if _SPANS in vars(state):
            setattr(completion, field, vars(state)[_SPANS])
        return completion

    return new_completion_output
