"""The page of a run, trackers and files of samples."""
