"""What each exercise must show: one module a lab, one function an exercise."""
