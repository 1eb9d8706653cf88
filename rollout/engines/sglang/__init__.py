"""The rollout engine `sglang`: an SGLang server, unchanged, driven over its HTTP API.

Facts about SGLang, from the sources of release 0.5.23 below ``python/sglang/srt``, and seen in a server of that release:

- A finished answer of ``/generate`` has ``meta_info.weight_versions``: which version generated which tokens, counted in the
  scheduler (``utils/weight_versions.py``; since pull request 35926). Chunks before have the version that served when they were
  sent (``managers/tokenizer_manager.py``), which says nothing about their tokens.
- ``/pause_generation`` with mode ``retract`` processes the step that was launched, then puts all requests back into the queue;
  they prefill prompt and tokens again after ``/continue_generation`` (``managers/scheduler.py``, ``pause_generation``). Mode
  ``in_place`` leaves the launched step's tokens unread: the scheduler would count them for the version that comes next.
- ``/update_weights_from_disk`` loads all safetensors files of a directory into the live weights, empties the prefix cache, and
  counts later tokens for ``weight_version`` (``managers/scheduler_components/weight_updater.py``). It fails without a change
  where it finds no file. Where loading fails half-way it loads the same files again, which ends the server
  (``model_executor/model_runner_components/weight_updater.py``).
- Log-probabilities are those of the logits over the temperature, before top_k and top_p; ``SGLANG_RETURN_ORIGINAL_LOGPROB=1``
  takes the temperature out, too. ``return_sampling_mask`` has those of the distribution that was drawn from, and needs a top_k
  of at most ``--sampling-mask-max-tokens`` (``layers/sampler.py``, ``managers/scheduler.py``).
- With a top_k, top_p still counts the probability of all tokens (``layers/sampler.py``: ``joint``, and the same in torch).
- ``ignore_eos`` turns stop tokens off as well, and without it the model's own end-of-sequence tokens stop
  (``managers/schedule_batch.py``, ``_check_token_based_finish``). So the client stops requests.
- ``/abort_request`` ends all requests whose id begins with the one that it names (``managers/scheduler.py``).
- Seeds count with ``--enable-deterministic-inference`` only, where a request without one gets 42
  (``sampling/sampling_batch_info.py``).
"""
