"""Has replicas generate groups: for training as far as the staleness budget allows, and for evaluations."""
