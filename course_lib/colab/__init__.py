"""Google Colab: what a notebook's first cell calls there (`prepare`), and what keeps that cell in the notebooks.

The rest of course_lib may not be importable yet when this room is: it stands on the standard library and on
`packaging`, which every Jupyter kernel brings along.
"""

from course_lib.colab.runtime import NotReady, prepare

__all__ = ["NotReady", "prepare"]
