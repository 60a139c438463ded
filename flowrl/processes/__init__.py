"""One run on several processes: launching, sharding, and collective calls."""
