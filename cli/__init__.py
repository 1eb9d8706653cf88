"""The ``weightlane`` command: composes the parts of a run. Nothing else imports it."""
