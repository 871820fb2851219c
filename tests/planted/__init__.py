"""Planted answers: for each exercise wrong ones, with the words that they must get, and a right one written another way."""
