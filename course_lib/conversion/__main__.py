"""``python -m course_lib.conversion split|merge|seal``"""

import sys

from course_lib.conversion.command import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
