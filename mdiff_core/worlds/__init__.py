"""Small worlds with a known right answer, for demos and tests."""
