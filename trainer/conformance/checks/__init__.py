"""The checks of the suite, grouped by part of the contract."""
