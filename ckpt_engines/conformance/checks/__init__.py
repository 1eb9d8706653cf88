"""The checks of the conformance suite, by promise."""
