"""Lives of stores that share a bucket, each from its seed, in virtual time: real stores and keepers, an adversarial
bucket, clients that retry, and a checker that knows only what clients saw.

`loops` has an event loop for each process, `bucket` the bucket, `store` a store as a process, `clients` those who use
it, `history` what they saw and the checker, `life` all of it together. `python -m support.bucket_lives SEED`, in
tests/, replays a life.
"""

from __future__ import annotations

from support.bucket_lives.life import Outcome, live

__all__ = ["Outcome", "live"]
