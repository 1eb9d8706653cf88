"""The contract of rollout engines: `RolloutEngine`, one per replica, and `RankLoader`, one per rank that takes versions."""
