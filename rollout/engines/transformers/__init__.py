"""The rollout engine `transformers`: generates with Hugging Face's own models, one request at a time, in the replica's process.

It needs no vLLM and runs wherever torch does, for small models. Every version is loaded as `from_pretrained` loads a checkpoint.
"""
