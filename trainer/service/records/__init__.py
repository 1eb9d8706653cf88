"""Everything that the service keeps: requests and answers, sessions, and checkpoints."""
