"""What a call gives back: decoded media, and checks that its numbers can be used."""
