"""Retention: what happens to the KV of a turn that has ended."""
