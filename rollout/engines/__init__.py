"""Rollout engines besides vLLM, which has rooms of its own."""
