"""Inputs of a call for each prompt: encodings, texts, images and other arguments."""
