"""A data-parallel training that continues exactly where it was killed."""
