"""Stock offline vLLM as a `json_program`, without processes of its own: nothing here but vLLM's calls, one `LLM` at a time."""

from __future__ import annotations

import dataclasses
import gc
from typing import Any

from json_program import serve
from tiny_models import described
from vllm import LLM, SamplingParams
from vllm.distributed import cleanup_dist_env_and_memory
from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory
from vllm.outputs import CompletionOutput

from weightlane.rollout.vllm import version_stamps


def plain(spans: Any) -> list[list[Any]] | None:
    return None if spans is None else [[span.version, span.start, span.end] for span in spans]


class Offline:
    """One `LLM` at a time."""

    def __init__(self) -> None:
        self._llm: Any = None

    def start(self, model: str, dtype: str, backend: str | None, runner: str = "auto") -> None:
        self._llm = None
        gc.collect()
        cleanup_dist_env_and_memory()
        self._llm = LLM(
            model,
            dtype=dtype,
            runner=runner,
            max_model_len=128,
            enforce_eager=True,
            kv_cache_memory_bytes=64 << 20,
            skip_tokenizer_init=runner == "auto",
            weight_transfer_config={"backend": backend} if backend else None,
        )

    def attempt(self, method: str, arguments: list[object]) -> str:
        """The text of the error of one of vLLM's calls, or nothing."""
        try:
            getattr(self._llm, method)(*arguments)
        except Exception as error:  # noqa: BLE001 - the test judges it
            return str(error)
        return ""

    def trainer_engine(self) -> str:
        """The class that vLLM's plugins have registered for trainers."""
        return WeightTransferTrainerFactory._registry["weightlane"]().__name__

    def weight_version(self) -> str:
        return str(self._llm.get_weight_version())

    def greedy(self, prompt: list[int], count: int) -> list[int]:
        params = SamplingParams(temperature=0, max_tokens=count, ignore_eos=True, detokenize=False)
        [answer] = self._llm.generate([{"prompt_token_ids": prompt}], params, use_tqdm=False)
        return list(answer.outputs[0].token_ids)

    def stamp(self) -> bool:
        """Before `start`: let weightlane stamp completions beside vLLM. Returns False where only weightlane does, before 0.32."""
        both = any(field.name == "weight_versions" for field in dataclasses.fields(CompletionOutput))
        if both:
            version_stamps.install("stamps")
        return both

    def begin(self, prompts: list[list[int]], count: int) -> None:
        """Add requests, which `steps` decodes."""
        self._ended: dict[str, Any] = {}
        for number, prompt in enumerate(prompts):
            params = SamplingParams(temperature=0, max_tokens=count, ignore_eos=True, detokenize=False)
            self._llm.llm_engine.add_request(str(number), {"prompt_token_ids": prompt}, params)

    def steps(self, count: int) -> list[Any]:
        """Decode so many steps; return of each completion so far its tokens, vLLM's spans once it has ended, and weightlane's."""
        for _ in range(count):
            self._ended |= {output.request_id: output.outputs[0] for output in self._llm.llm_engine.step()}
        return [
            [len(found.token_ids), *(plain(getattr(found, name, None)) for name in ("weight_versions", "stamps"))]
            for _, found in sorted(self._ended.items())
        ]

    def embedding(self, prompt: list[int]) -> list[float]:
        [answer] = self._llm.embed([{"prompt_token_ids": prompt}], use_tqdm=False)
        return list(answer.outputs.embedding)

    def parameters(self) -> dict[str, list[object]]:
        """Every live parameter, `described`."""
        model = self._llm.llm_engine.model_executor.driver_worker.worker.model_runner.get_model()
        return {name: described(tensor) for name, tensor in model.named_parameters()}


if __name__ == "__main__":
    serve(Offline())
