"""Likelihoods of samples under a policy: densities of steps, matching errors, tokens."""
