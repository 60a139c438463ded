"""Losses: the objective that is minimised, from advantages and likelihoods.

They are pure functions of policies' evaluations; no model is called in this room. `new` is the
policy being trained, `old` the sampling policy, `ref` the frozen initial policy; other roles are
named averages.

    base          entries of a loss, their reduction, the base of all losses on ratios
    ratio         PPO's clipped surrogate
    token         other losses on ratios, from the language-model literature
    divergence    losses on ratios whose divergence or penalty keeps the policy near, without a clip
    regression    weighted likelihood, NFT
    preference    comparisons within a group: DPO's pairs, DGPO, CRD
    off_policy    losses on samples of any policy
    reward        the loss of methods that follow a reward's own gradient
    distillation  a divergence from a teacher
    averages      slow averages of the weights, and teachers, which losses read
    weights       factors on the policy term of tokens
"""
