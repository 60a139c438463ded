"""What a call is given for each prompt: encodings, texts, images and other arguments."""
