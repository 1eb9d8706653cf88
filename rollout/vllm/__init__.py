"""weightlane inside vLLM's processes: the plugin, the weight-transfer engine of each rank, and commits in the engine core.

The steps from a trainer's version to live vLLM parameters:

1. vLLM's plugin loader calls `plugin.register` in every vLLM process, which registers the transfer engine ``weightlane``.
2. When the model is loaded, `transfer_engine` traces where weights go and rehearses a version: see `weightlane.rollout.layout`.
3. ``init_weight_transfer_engine`` connects each rank to the publisher. A `weightlane.sync.Subscriber` then stages versions on its
   own thread, while the model generates.
4. ``update_weights`` with a staged version, or the ``finish_weight_update`` after it, reaches `commit_in_core`, which pauses
   between two decode steps and calls every rank.
5. On each rank `live_weights` copies the staged tensors into the parameters, on all ranks or on none. The engine core resumes.

Nothing here imports vLLM before vLLM calls it.
"""
