"""The checks of the suite, by the part of the contract that they are about."""
