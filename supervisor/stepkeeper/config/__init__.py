"""Settings of `stepkeeper run`: declared once (`settings.py`), set in six places, one value each.

Command line, environment, the run directory's file, the user's, the site's, default: the first that sets a key
wins.  An administrator may lock keys; what is unknown, out of range or not trustworthy is refused, never ignored.
"""
