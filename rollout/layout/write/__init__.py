"""Writing: puts versions into live parameters, by precomputed copies or through vLLM's own loading."""
