"""A pipeline's denoising loop as a function, and what its steps and images do to states."""
