"""vLLM's internals that weightlane uses or replaces: neither is part of vLLM's public interface."""
