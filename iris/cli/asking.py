"""What verbs print that ask every member of a cluster: who did not answer, and who cannot be asked."""

from __future__ import annotations

from typing import Any

import iris
from iris.cli.exits import Exit, complain, exit_code
from iris.wire.names import plural, printable


def report(cluster: str, found: iris.PerMember[Any]) -> int:
    """Name on stderr the members that gave no answer, and return the exit code."""
    for member, error in found.failed.items():
        complain(f"member {member}: {error}")
    for site, count in found.sites.items():
        complain(f"{plural(count, 'member')} in site {printable(site)} cannot be asked from here")
    if found.failed:
        return max(exit_code(error) for error in found.failed.values())
    if not found:
        complain(f"no members of {cluster} in this site")
        return Exit.NO_MEMBERS
    return Exit.OK
