"""Algorithms: what happens between a batch and changed parameters, each a short program over the roles of a dispatch."""
