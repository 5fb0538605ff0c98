"""The promises that `bench/proof.py` proves: one module per area, each with a `run` and the roles that it starts."""
