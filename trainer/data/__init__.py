"""Tasks, tokens, rewards, and the batches made of them."""
