"""One iteration: samples, scores and credit."""
