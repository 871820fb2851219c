"""What real frameworks need to run on CPU ranks."""
