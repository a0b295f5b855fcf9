"""Imported at the start of each Python below a launch for which standbys wait: its directory is on PYTHONPATH.

It loads the sitecustomize that it stands in front of, if there is one.  Then it has a standby become the rank, where
this is the Python of one (`wrapper.py`).  Any Python must be able to read it, so it uses no new syntax.
"""

import os
import sys


def _hand_over():
    slot = os.environ.get("STEPKEEPER_STANDBY_SLOT", "")
    if sys.version_info < (3, 10) or slot not in os.environ:  # torchrun's own Python, or what a rank has started
        return
    import importlib.util

    path = os.path.join(os.path.dirname(_DIRECTORY), "wrapper.py")
    spec = importlib.util.spec_from_file_location("_stepkeeper_wrapper", path)
    wrapper = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(wrapper)
    wrapper.hand_over(os.environ, _DIRECTORY)


_DIRECTORY = os.path.dirname(os.path.abspath(__file__))
sys.path[:] = [each for each in sys.path if os.path.abspath(each) != _DIRECTORY]
del sys.modules["sitecustomize"]
try:
    import sitecustomize  # the one behind us; where there is none, the interpreter takes the error for that
finally:
    try:
        _hand_over()
    except Exception as error:
        sys.stderr.write("stepkeeper: no warm standby for this rank: %s: %s\n" % (type(error).__name__, error))
