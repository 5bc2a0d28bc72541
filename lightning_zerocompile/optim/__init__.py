"""Optimizers on sharded parameters: which are supported, and how each kind steps."""
