"""How long a transfer plan should take, on models and networks that need not be there."""
