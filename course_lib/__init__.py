"""Beyond One GPU: the small library that the lessons call."""
