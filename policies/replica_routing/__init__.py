"""Replica routing: which replica serves a request."""
