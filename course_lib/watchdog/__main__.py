"""``python -m course_lib.watchdog``"""

import sys

from course_lib.watchdog.command import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
