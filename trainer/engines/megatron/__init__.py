"""``megatron``: megatron-core with tensor, pipeline, sequence, expert and data parallelism."""
