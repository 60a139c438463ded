"""A causal language model as a policy."""
