"""A report as HTML: a page of its own, and what a notebook shows."""
