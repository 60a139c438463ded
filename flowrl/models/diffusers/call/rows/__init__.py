"""Rows of a batch in calls of bounded size, and encodings kept between batches."""
