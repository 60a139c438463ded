"""Routes that stand around another: each with its planner, in a file that no other plan imports."""
