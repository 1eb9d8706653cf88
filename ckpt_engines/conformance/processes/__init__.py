"""The processes in which the conformance suite runs halves of an engine."""
