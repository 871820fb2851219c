"""Widgets of the lessons. Without a running kernel each shows a picture of how it starts."""
