"""Real execution: Triton kernels with torch references, and an executor that runs the batches of the one scheduler."""
