"""Records, the panel and alarms: they read what an iteration made."""
