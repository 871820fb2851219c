"""What an instructor or an author of the course runs."""
