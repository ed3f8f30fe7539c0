"""Real sessions of coding agents: what an engine should do with the KV cache of an agent that waits."""
