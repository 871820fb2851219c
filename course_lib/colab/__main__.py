"""`python -m course_lib.colab --write | --check`."""

import sys

from course_lib.colab.notebooks import main

if __name__ == "__main__":
    sys.exit(main())
