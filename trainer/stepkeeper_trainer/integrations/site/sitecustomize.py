"""Imported at the start of each Python below a training with `--attach`: its directory is first on PYTHONPATH.

It loads `hook.py`, and then the sitecustomize that it stands in front of, if there is one.  Any Python must be able to
read it, so it uses no new syntax.
"""

import os
import sys


def _load_hook():
    if sys.version_info < (3, 10):
        return
    import importlib.util

    path = os.path.join(os.path.dirname(_DIRECTORY), "hook.py")
    spec = importlib.util.spec_from_file_location("_stepkeeper_hook", path)
    hook = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(hook)
    hook.install()


_DIRECTORY = os.path.dirname(os.path.abspath(__file__))
try:
    _load_hook()
except Exception as error:
    sys.stderr.write("stepkeeper: nothing is attached: %s: %s\n" % (type(error).__name__, error))
sys.path[:] = [each for each in sys.path if os.path.abspath(each) != _DIRECTORY]
del sys.modules["sitecustomize"]
import sitecustomize  # the one behind us; where there is none, the interpreter takes the error for that
