"""What is minimised, given advantages and likelihoods."""
