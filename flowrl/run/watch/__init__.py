"""Alarms, histograms and facts about texts: they read an iteration's results."""
