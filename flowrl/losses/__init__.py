"""Losses: the objective that is minimised, from advantages and likelihoods."""
