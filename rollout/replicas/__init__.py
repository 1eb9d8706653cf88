"""Rollout replicas: vLLM in this process (`worker`), in a Ray actor (`ray_actor`), or in its HTTP server (`server_replica`)."""
