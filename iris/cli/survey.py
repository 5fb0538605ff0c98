"""`iris survey`: ask every member and print the answers."""

from __future__ import annotations

from iris.cli import options, output
from iris.cli.exits import Exit, complain, run
from iris.cli.members import hint_at_served
from iris.client import connect


def survey(
    cluster: options.Cluster,
    payload: options.Payload = None,
    timeout: options.Timeout = 5.0,
    header: options.HeaderList = None,
    method: options.Method = None,
    pack: options.Pack = False,
    scope: options.Scope = "federation",
    json: options.AsJson = False,
    relay: options.RelayPath = None,
) -> None:
    """Ask every member of a cluster and print each answer on a line, as it arrives.

    Members that answer with an error, or do not answer in time, are named on
    stderr. The exit code is then 1 or 5.

    \b
    Examples:
      iris survey databases "version?"
      iris survey caches --json --timeout 1 < question.bin
    """
    body = options.read_payload(payload, pack=pack)
    headers = options.parse_headers(header)

    async def work() -> int:
        async with connect(relay) as client, hint_at_served(client, cluster):
            answers = client.survey(
                cluster, body, timeout=timeout, headers=headers, scope=scope, method=method
            )
            async for message in answers:
                output.show(message, as_json=json)
        for member, detail in answers.failed.items():
            complain(f"member {member} answered with an error: {detail}")
        for member in answers.missing:
            complain(f"no answer from member {member} within {timeout:g} s")
        if answers.missing:
            return Exit.TIMEOUT
        return Exit.ANSWER if answers.failed else Exit.OK

    run(work)
