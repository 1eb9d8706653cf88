"""weightlane inside vLLM: plugin, weight-transfer engine, and whole commits in the engine core."""
