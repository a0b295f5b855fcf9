"""What GPU fault reports mean.  Pure: text and readings in, judged faults out."""
