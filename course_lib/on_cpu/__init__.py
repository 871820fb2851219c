"""What real frameworks need to run on CPU ranks. With CUDA nothing here changes anything."""
