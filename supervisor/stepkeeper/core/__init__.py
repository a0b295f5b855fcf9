"""What Stepkeeper decides, and nothing else: pure functions over frozen records."""
