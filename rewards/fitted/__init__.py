"""A reward fitted to people's votes: the model of votes, its features, and its folder."""
