"""The service's stored state: requests and answers, sessions, models, and checkpoints."""
