"""Settings of every test; its place here also lets every test import the helpers of this folder (serving_runs)."""

from hypothesis import settings

# Hypothesis measures wall-clock time by default and fails on it; no test here may.
settings.register_profile("simcore", deadline=None)
settings.load_profile("simcore")
