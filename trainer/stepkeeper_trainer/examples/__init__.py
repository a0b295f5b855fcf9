"""Scripts that show the library at work."""
