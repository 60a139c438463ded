"""Likelihoods of samples under a policy: of steps, of clean samples (by matching), of tokens."""
