"""The processes of a run or service: preparation, resources, Ray cluster, observers, display and cleanup."""
