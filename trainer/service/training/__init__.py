"""Training requests of all clients: their order, and how each is carried out."""
