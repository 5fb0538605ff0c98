"""Streams in object storage: journals of sealed objects, and who holds them.

`objects` is the bucket, `sealing` what is in an object, `writer` a journal that grows, `history` a
journal that is read, `succession` how a store takes over another's journal, `keeper` all of it for
one store. `tests/support/bucket_model.py` is a model of these rules, and checks them.
"""
