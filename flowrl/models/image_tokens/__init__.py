"""Language models that write images: entries of a codebook, which a decoder turns into pixels."""
