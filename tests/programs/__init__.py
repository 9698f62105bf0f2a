"""Other people's programs, unedited: each row of `table.py` run from a checkout, and a page of what became of it."""
