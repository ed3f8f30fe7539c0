"""Studies of real execution: what `simcore validate live` plays on a CPU and on a GPU."""
