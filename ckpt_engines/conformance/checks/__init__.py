"""The checks of the conformance suite, grouped by promise."""
