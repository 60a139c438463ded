"""A run's page, trackers and files of samples."""
