"""Its place here lets every test import the helpers of this folder (serving_runs)."""
