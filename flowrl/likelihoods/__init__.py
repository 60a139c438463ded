"""How likely the policy makes what was sampled: densities of steps, matching errors, tokens."""
