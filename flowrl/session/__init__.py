"""The objects of a run: session, learner, policies, writers."""
