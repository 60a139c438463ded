"""Pages to look at: the report of a run, and several runs compared, each one HTML file"""
