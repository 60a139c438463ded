"""Results of a call: decoded media, and checks that its numbers can be used."""
