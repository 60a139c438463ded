"""Driving a pipeline's own call: state, level, prompt and images in, velocity out."""
