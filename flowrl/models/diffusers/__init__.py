"""Any diffusers pipeline as a policy: its own call is driven from outside, and that is proven."""
