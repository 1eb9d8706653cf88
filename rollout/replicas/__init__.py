"""Rollout replicas: vLLM in this process, in a Ray actor, or behind its HTTP server."""
