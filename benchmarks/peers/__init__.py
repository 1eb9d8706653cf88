"""Other ways to carry a state dict from one process to several, measured beside weightlane's in one run.

    python -m benchmarks.peers --model qwen3-0.6b --receivers 2 --rounds 5 --json peers.json

See README.md in this folder.
"""
