"""Sharded training of the transformer, and the command line.

`python -m normfuse.train` trains a small model on text that every machine has.
"""
