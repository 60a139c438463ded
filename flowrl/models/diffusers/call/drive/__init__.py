"""One driven call: the scheduler's stand-in, the places where states enter, and stubs."""
