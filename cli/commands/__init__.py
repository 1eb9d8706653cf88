"""The commands of ``weightlane``, a module each."""
