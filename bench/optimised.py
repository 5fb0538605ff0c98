"""Find out if this interpreter was built with profile-guided optimisation, which makes Python code a fifth to a
quarter faster.

    python3 bench/optimised.py && echo optimised

It runs on any Python 3 and imports nothing else, because the Makefile runs it with each Python that it finds.
"""

import os
import sys
import sysconfig


def built_optimised() -> bool:
    """Return whether the build is optimised: it says so, or it is a package of Debian or Ubuntu, which do not say
    it."""
    if "--enable-optimizations" in (sysconfig.get_config_var("CONFIG_ARGS") or ""):
        return True
    return sys.base_prefix == "/usr" and os.path.exists("/etc/debian_version")


if __name__ == "__main__":
    sys.exit(not built_optimised())
