"""Commits: one replica's weights change between two decode steps.

The steps of a commit, from the side of the loop:

1. The coordinator reports that every rank of a replica has staged a version.
2. The replica makes one ``update_weights`` call to its engine, with a `transfer_calls.EngineCommit`.
3. vLLM's engine core pauses, lets every rank replace its parameters, and resumes: see `weightlane.rollout.vllm`.
4. If a rank fails, all ranks agree on one error (`weightlane.rollout.contract.rank_group`), which `remote_failure` carries
   through vLLM's RPC.
5. `token_clock` measures how long requests waited for their next token.
"""
