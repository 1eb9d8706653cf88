"""Proof that written versions equal an ordinary load: both are made on a second model that never serves, and compared."""
