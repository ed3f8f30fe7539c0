"""One folder per decision point, one file per policy; found by name (`simcore policies` lists them)."""
