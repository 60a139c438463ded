"""Models as policies: their interface, diffusers pipelines and causal language models."""
