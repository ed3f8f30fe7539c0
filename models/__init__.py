"""Components: LLM architectures, GPUs, cost models, KV cache, scheduler, replica, cluster, metrics; the decision points."""
