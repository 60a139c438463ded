"""The answer in a text: boxes and formulas of mathematics, fenced programs; and the forms in
which data sets write right answers and tests. Plain text in, plain text out.
"""
