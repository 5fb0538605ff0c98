"""`python -m relay.start`: a relay with all its settings in the environment and a file.

`iris relay` becomes this process once it has read its arguments. They stay on the command line, so that people find the process.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import replace

from iris import keyfiles, paths
from iris.causes import print_causes
from iris.crypto.keys import NetworkKey
from iris.errors import ConfigError, IrisError
from relay.daemon import run
from relay.settings import load_config


def main(environ: Mapping[str, str]) -> int:
    """Run the relay until it is told to stop, and return the exit code. Wrong settings and keys are reported on stderr."""
    try:
        config = load_config({}, environ, None)
        keys = _dev_keys(environ) if config.dev else network_keys(environ)
        run(replace(config, network_keys=keys), environ)
    except IrisError as err:
        sys.stderr.write(f"iris relay: {err}\n")
        print_causes(err)
        return 2
    return 0


def network_keys(environ: Mapping[str, str]) -> tuple[NetworkKey, ...]:
    """Return the keys of the networks that this host's relay is in; raises IrisError where there are none."""
    directory = keyfiles.config_directory(environ)
    path = directory / keyfiles.NETWORK_FILE
    if not path.exists():
        raise IrisError(
            f"no network key at {path}. Make one with `iris key new`, or copy network.toml from a host of your network. "
            "For a relay on this host alone: iris relay --dev"
        )
    return keyfiles.load_network_keys(path)


def _dev_keys(environ: Mapping[str, str]) -> tuple[NetworkKey, ...]:
    """Return throw-away keys of the runtime directory, made at first use. Clients without their own keys use them."""
    directory = paths.dev_key_directory(environ, os.geteuid())
    try:
        directory.parent.mkdir(mode=0o700, exist_ok=True)
    except OSError as err:
        raise ConfigError(f"no runtime directory {directory.parent}: {err.strerror}") from err
    path = directory / keyfiles.NETWORK_FILE
    if not path.exists():
        keyfiles.create_keys(directory)
    sys.stderr.write(
        f"iris relay: throw-away development keys in {directory}, kept until this host restarts\n"
    )
    if keyfiles.has_keys(environ):
        own = keyfiles.config_directory(environ) / keyfiles.KEYRING_FILE
        sys.stderr.write(f"iris relay: programs of this user use the keys of {own} instead\n")
    return keyfiles.load_network_keys(path)


if __name__ == "__main__":
    sys.exit(main(os.environ))
