"""Training: what parts of the engines cost beside what they replace, and how much changes from one optimizer step to the next."""
