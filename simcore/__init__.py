"""The discrete-event core: a clock, links, randomness by name, tables, config, processes. It knows nothing about LLMs."""

from simcore.errors import BadInput, ConfigError, NoProgress, PolicyError, SimcoreError, TraceError

__version__ = "0.1.0"
__all__ = ["BadInput", "ConfigError", "NoProgress", "PolicyError", "SimcoreError", "TraceError", "__version__"]
