"""How many replicas a run has: requests of ``weightlane scale``, the run's answers, and the room for them in Ray."""
