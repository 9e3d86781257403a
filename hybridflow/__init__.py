"""HybridFlow: reinforcement learning of language models on Megatron-core and vLLM in the same processes."""

__version__ = "0.1.0"
