"""The parts of ``weightlane train``: resources, Ray cluster, observers, display and cleanup."""
