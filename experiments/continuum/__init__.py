"""Continuum (arXiv 2511.02230 v6): its claims, the studies behind them, and what others measured of it."""
