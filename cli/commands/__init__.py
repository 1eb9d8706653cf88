"""The commands of ``weightlane``, one module each."""
