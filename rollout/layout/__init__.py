"""Layout: where each element of a checkpoint lands in a live vLLM model, and commits that copy versions along it.

The steps from a staged version to live parameters:

1. `trace_loading` watches the model's own ``load_weights`` load tensors without data. The result is a `LayoutMap`: strided copies
   from checkpoint tensors into parameters, and refusals of everything that is no copy. This takes milliseconds.
2. `choose_write_method` decides from the layouts of all ranks which tensors are copied, and which go through vLLM's own loading.
3. ``proof.rehearsal`` writes made-up versions into a second model, and compares it with an ordinary load bit for bit.
4. `needed_boxes` tells which slices of the checkpoint tensors this rank asks the trainer for.
5. `CommitPlan` looks up the live memory of every copy once. Each commit then only copies staged tensors into the parameters.

`VersionLoader` makes these steps for a vLLM worker, and repeats them if parameters move or other tensors are sent.

In a vLLM worker, inside vLLM's current config::

    from weightlane.rollout.layout.map.coverage import Reads
    from weightlane.rollout.layout.map.layout_map import SourceSpec
    from weightlane.rollout.layout.map.needs import needed_boxes
    from weightlane.rollout.layout.trace.trace import trace_loading
    from weightlane.rollout.layout.write.commit_plan import CommitPlan
    from weightlane.rollout.layout.write_method import choose_write_method

    layout = trace_loading(model, {"lm_head.weight": SourceSpec((300, 64), torch.bfloat16), ...})
    method = choose_write_method(model, layout, [Reads.of(layout)])  # of all tensor-parallel ranks
    needed_boxes(method.layout)  # the parts of the tensors that this rank uses
    CommitPlan(method.layout, model).commit(tensors)
"""
