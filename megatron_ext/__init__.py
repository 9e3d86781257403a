"""What Megatron-core lacks for reinforcement learning of language models; never imports hybridflow."""
