"""Every inside of vLLM that weightlane uses or changes."""
