"""`python -m relay.start`: runs a relay whose settings are all in the environment and a file.

`iris relay` turns into this process after it has parsed its arguments. They stay on the command line, so that people
can find the process.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import replace

from iris import keyfiles, paths, program
from iris.causes import print_error
from iris.crypto.keys import NetworkKey
from iris.errors import ConfigError, IrisError
from relay.daemon import run
from relay.settings import load_config


def main(environ: Mapping[str, str]) -> int:
    """Run the relay until a signal stops it, and return the exit code.

    Wrong settings and keys are reported on stderr.
    """
    program.begin()
    try:
        config = load_config({}, environ, None)
        keys = _dev_keys(environ) if config.dev else network_keys(environ)
        run(replace(config, network_keys=keys), environ)
    except IrisError as err:
        print_error("iris relay", err)
        return 2
    return 0


def network_keys(environ: Mapping[str, str]) -> tuple[NetworkKey, ...]:
    """Return the network keys of this host; raises IrisError if there are none."""
    directory = keyfiles.config_directory(environ)
    path = directory / keyfiles.NETWORK_FILE
    if not path.exists():
        raise IrisError(
            f"no network key at {path}; make one with `iris key new`, or copy network.toml from a host of your network. "
            "To try a relay on this host alone, run iris relay --dev"
        )
    return keyfiles.load_network_keys(path)


def _dev_keys(environ: Mapping[str, str]) -> tuple[NetworkKey, ...]:
    """Return the throw-away keys in the runtime directory, made at first use. Clients without keys use them, too."""
    directory = paths.dev_key_directory(environ, os.geteuid())
    try:
        directory.parent.mkdir(mode=0o700, exist_ok=True)
    except OSError as err:
        raise ConfigError(
            f"cannot make the runtime directory {directory.parent}: {err.strerror}; set XDG_RUNTIME_DIR to one that you can write to"
        ) from err
    path = directory / keyfiles.NETWORK_FILE
    if not path.exists():
        keyfiles.create_keys(directory)
    if keyfiles.has_keys(environ):
        own = keyfiles.config_directory(environ) / keyfiles.KEYRING_FILE
        said = f"relay for development, without links; programs of this user use their own keys in {own}"
    else:
        said = (
            f"using throw-away development keys in {directory}, which last until this host restarts"
        )
        if environ.get("IRIS_CONFIG"):
            said += (
                "; run programs without IRIS_CONFIG, because with it they do not find these keys"
            )
    sys.stderr.write(f"iris relay: {said}\n")
    return keyfiles.load_network_keys(path)


if __name__ == "__main__":
    sys.exit(main(os.environ))
