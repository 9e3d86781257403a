"""Tests of megatron_ext against HF transformers and torch."""
