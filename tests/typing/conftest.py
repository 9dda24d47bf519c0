"""Code that is read by type checkers and never run."""

collect_ignore = ["right_code.py", "wrong_code.py"]
