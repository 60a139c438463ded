"""One run on several processes: what each holds, and how they keep step."""
