"""Proof that copies give what an ordinary load gives, in a model that never serves."""
