"""Links: each wraps one half of an engine for the framework."""
