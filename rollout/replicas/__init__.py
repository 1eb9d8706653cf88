"""Rollout replicas: vLLM in this process (`local_replica`), in a Ray actor (`ray_actor`), in a server (`server_replica`)."""
