"""Write labs from solutions, Colab cells, slides, and read the instructors' notes."""
