"""A module's parameters as shards, and back."""
