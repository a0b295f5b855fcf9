"""`stepkeeper report`: a timeline as one HTML page that needs nothing else.

Pure: a timeline in, text out.  Its size is bounded, whatever the run's length and number of nodes.
"""
