"""Stock offline vLLM as a `json_program`, without processes of its own: nothing here but vLLM's calls, one `LLM` at a time."""

from __future__ import annotations

import gc
from typing import Any

from json_program import serve
from tiny_models import described
from vllm import LLM, SamplingParams
from vllm.distributed import cleanup_dist_env_and_memory
from vllm.distributed.weight_transfer.base import WeightTransferInitRequest, WeightTransferUpdateRequest


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

    def connect(self, rendezvous: dict[str, Any], backend: str, options: dict[str, Any]) -> str:
        """The error's text, or nothing."""
        info = {"rendezvous": rendezvous, "replica": "stock", "backend": backend, "options": options}
        try:
            self._llm.init_weight_transfer_engine(WeightTransferInitRequest(init_info=info))
        except Exception as error:  # noqa: BLE001 - the test judges it
            return str(error)
        return ""

    def commit(self, version: int) -> None:
        self._llm.start_weight_update()
        self._llm.update_weights(WeightTransferUpdateRequest(update_info={"version": version}))
        self._llm.finish_weight_update()
        self._llm.reset_prefix_cache()

    def greedy(self, prompt: list[int], count: int) -> list[int]:
        params = SamplingParams(temperature=0, max_tokens=count, ignore_eos=True, detokenize=False)
        [answer] = self._llm.generate([{"prompt_token_ids": prompt}], params, use_tqdm=False)
        return list(answer.outputs[0].token_ids)

    def embedding(self, prompt: list[int]) -> list[float]:
        [answer] = self._llm.embed([{"prompt_token_ids": prompt}], use_tqdm=False)
        return list(answer.outputs.embedding)

    def parameters(self) -> dict[str, list[object]]:
        """Every live parameter, `described`."""
        model = self._llm.llm_engine.model_executor.driver_worker.worker.model_runner.get_model()
        return {name: described(tensor) for name, tensor in model.named_parameters()}


if __name__ == "__main__":
    serve(Offline())
