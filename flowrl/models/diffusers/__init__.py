"""Diffusers pipelines as policies: flowrl drives the pipeline's own call, and proves that it
does."""
