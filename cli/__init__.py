"""The ``weightlane`` command, which composes the parts of a run. No other package imports it."""
