"""What only a GPU can tell of the course, in five parts of at most three minutes: `make gpu`."""
