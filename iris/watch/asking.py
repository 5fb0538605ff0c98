"""Asks relays, members and stores what they say of themselves, within bounds of time and number."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from typing import Final

from iris.client import Client
from iris.describing import DESCRIBE, read_description
from iris.dialling import REMOTE
from iris.errors import Closed, DecodeError, IrisError, KeyringError, RemoteError
from iris.membership import Members
from iris.program import host_name
from iris.streams.listing import StreamInfo
from iris.watch.sample import ClusterAnswer, MemberAnswer, RelayAnswer, Sample, StreamAnswer
from iris.wire.consumers import ConsumerInfo

ANSWER_S: Final = 2.0
"""How long one answer is waited for."""
LOST_S: Final = 0.5
"""How long a relay whose connection was lost is waited for until it counts as away."""
MAX_FOLLOWED: Final = 128
"""Clusters whose members are followed."""
MAX_ASKED: Final = 256
"""Members that are asked for one sample; of more, those that were asked longest ago."""
MAX_STREAMS_ASKED: Final = 64
"""Streams whose consumers are asked for in one sample."""
AT_ONCE: Final = 32
STREAMS_S: Final = 2.0
"""Stores are not asked more often."""

Opener = Callable[[str | None, bool], Client]
"""Makes a client for a relay, given its address; with False, one without keys."""


class Turns:
    """Chooses who is asked next: at most so many at a time, and those first that were asked longest ago."""

    def __init__(self) -> None:
        self._asked: dict[str, int] = {}
        """Who can be asked -> number of the round in which it was last; 0 if it never was."""
        self._round = 0

    def next(self, ids: Iterable[str], most: int) -> list[str]:
        """Return who is asked now, out of `ids`. Who is not in them is forgotten."""
        self._round += 1
        self._asked = {each: self._asked.get(each, 0) for each in ids}
        chosen = sorted(self._asked, key=self._asked.__getitem__)[:most]
        self._asked.update(dict.fromkeys(chosen, self._round))
        return chosen


class RelayAsker:
    """One relay that is asked for its status."""

    def __init__(self, relay: str | Client | None, opener: Opener, *, keyed: bool) -> None:
        """`relay` is an address, or an open client, which stays open.

        With `keyed`, members and stores are asked through it, so it gets the keys.
        """
        address = None if isinstance(relay, Client) else relay
        self._borrowed = relay if isinstance(relay, Client) else None
        self._address = address
        self._opener = opener
        self._keyed = keyed
        self._shown = address or "of this host"
        """What the relay is called: its socket, once it has answered."""
        self.client: Client | None = None
        self.no_keys = ""
        """Why the client has no keys."""

    async def ask(self) -> RelayAnswer:
        """Return the status of the relay, or why there is none."""
        wait_s = ANSWER_S
        try:
            if self.client is not None and self.client.stats().connected_since is None:
                wait_s = LOST_S
            async with asyncio.timeout(wait_s):
                if self.client is None:
                    await self._open()
                assert self.client is not None
                report = await self.client.status(timeout=wait_s)
        except Closed as err:
            await self.close()
            return self._answer(None, str(err))
        except TimeoutError as err:
            why = str(err) if isinstance(err, IrisError) else ""
            return self._answer(None, why or f"no answer within {wait_s:g} s")
        except (IrisError, OSError) as err:
            return self._answer(None, str(err))
        return self._answer(report, "")

    async def _open(self) -> None:
        if self._borrowed is not None:
            self.client = self._borrowed
            return
        client = self._opener(self._address, self._keyed)
        try:
            await client.__aenter__()
        except KeyringError as err:
            if not self._keyed:
                raise
            self._keyed, self.no_keys = False, str(err)
            await self._open()
        else:
            self.client = client

    async def close(self) -> None:
        """Disconnect. Idempotent."""
        client, self.client = self.client, None
        if client is not None and client is not self._borrowed:
            await client.close()

    def _answer(self, report: dict[str, object] | None, error: str) -> RelayAnswer:
        address = self._shown
        if address.startswith(REMOTE):
            host = address.removeprefix(REMOTE).rpartition(":")[0]
        else:
            host = host_name()
        if not self._address and report is not None:
            address = self._shown = str(report.get("socket", address))
        return RelayAnswer(address, host, report, error)


class Follower:
    """Follows the members of clusters, so that relays report changes and are not asked again and again."""

    def __init__(self) -> None:
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._members: dict[str, Members] = {}
        self._listed: dict[str, asyncio.Event] = {}
        self.errors: dict[str, str] = {}

    def follow(self, client: Client, names: Iterable[str]) -> None:
        """Follow exactly these clusters from now on."""
        wanted = set(names)
        for name in [*self._tasks]:
            if name not in wanted:
                self._tasks.pop(name).cancel()
                self._members.pop(name, None)
                self._listed.pop(name, None)
                self.errors.pop(name, None)
        for name in sorted(wanted):
            if name not in self._tasks or self._tasks[name].done():
                self._listed.setdefault(name, asyncio.Event())
                self._tasks[name] = asyncio.create_task(
                    self._run(client, name), name=f"iris-watch-{name}"
                )

    async def _run(self, client: Client, name: str) -> None:
        listed = self._listed[name]
        try:
            async for members in client.watch_members(name):
                self._members[name] = members
                self.errors.pop(name, None)
                listed.set()
        except IrisError as err:
            self.errors[name] = str(err)
        finally:
            listed.set()

    async def listed(self, timeout: float) -> None:
        """Wait until the members of each cluster were listed once, at most `timeout` seconds."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout):
                for event in [*self._listed.values()]:
                    await event.wait()

    def answers(self) -> dict[str, ClusterAnswer]:
        """Return the members of each cluster as they are now."""
        return {
            name: ClusterAnswer(list(members), members.others, members.sites)
            for name, members in self._members.items()
            if name in self._tasks
        }

    async def close(self) -> None:
        """End all tasks."""
        tasks = [*self._tasks.values()]
        self._tasks.clear()
        self._members.clear()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class MemberAsker:
    """Asks members to describe themselves, at most `MAX_ASKED` for one sample."""

    def __init__(self) -> None:
        self._turns = Turns()

    async def ask(self, client: Client, clusters: dict[str, ClusterAnswer], timeout: float) -> None:
        """Add the answers of members to `clusters`."""
        of = {info.member: name for name, answer in clusters.items() for info in answer.members}
        chosen = self._turns.next(of, MAX_ASKED)
        until_s = time.monotonic() + timeout
        room = asyncio.Semaphore(AT_ONCE)

        async def one(cluster: str, member: str) -> None:
            async with room:
                left_s = max(0.05, until_s - time.monotonic())
                clusters[cluster].answers[member] = await _describe(client, cluster, member, left_s)

        async with asyncio.TaskGroup() as group:
            for member in chosen:
                group.create_task(one(of[member], member))


async def _describe(client: Client, cluster: str, member: str, timeout: float) -> MemberAnswer:
    try:
        packed = await client.request(
            cluster, b"", timeout=timeout, member=member, method=DESCRIBE, type=bytes
        )
        return MemberAnswer(read_description(packed))
    except RemoteError as err:  # it is there, but does not describe itself
        return MemberAnswer(None, f"does not describe itself: {err.detail}")
    except DecodeError as err:
        return MemberAnswer(None, str(err))
    except IrisError as err:
        return MemberAnswer(None, str(err), silent=True)


class StreamAsker:
    """Asks stores for their streams, and for the consumers of at most `MAX_STREAMS_ASKED` at a time."""

    def __init__(self) -> None:
        self._asked_s = float("-inf")
        self._turns = Turns()

    async def ask(
        self, client: Client, now_s: float, timeout: float
    ) -> tuple[list[StreamAnswer] | None, list[str]]:
        """Return the streams and what went wrong; None for the streams if it is too early to ask again."""
        if now_s - self._asked_s < STREAMS_S:
            return None, []
        self._asked_s = now_s
        try:
            infos = await client.streams.list(timeout=timeout)
        except IrisError as err:
            return None, [f"streams cannot be listed: {err}"]
        chosen = set(self._turns.next((info.uuid for info in infos), MAX_STREAMS_ASKED))
        problems: list[str] = []
        room = asyncio.Semaphore(AT_ONCE)

        async def consumers(info: StreamInfo) -> Sequence[ConsumerInfo] | None:
            async with room:
                try:
                    return await client.streams.consumers(
                        info.name, uuid=info.uuid, timeout=timeout
                    )
                except IrisError as err:
                    problems.append(f"consumers of {info.name} cannot be listed: {err}")
                    return None

        async with asyncio.TaskGroup() as group:
            asked = {
                info.uuid: group.create_task(consumers(info))
                for info in infos
                if info.uuid in chosen
            }
        answers = [
            StreamAnswer(info, asked[info.uuid].result() if info.uuid in asked else None)
            for info in infos
        ]
        return answers, problems


class Asking:
    """Everything that one watch asks; the first relay is the one through which members and stores are asked."""

    def __init__(self, relays: Sequence[str | Client | None], clusters: Sequence[str], opener: Opener) -> None:  # fmt: skip
        self._relays = [
            RelayAsker(relay, opener, keyed=not index) for index, relay in enumerate(relays)
        ]
        self._clusters = clusters
        self._follower = Follower()
        self._members = MemberAsker()
        self._streams = StreamAsker()

    async def sample(self, timeout: float) -> Sample:
        """Ask everything once. Raises nothing because somebody does not answer."""
        sample = Sample(time.monotonic(), time.time_ns() // 1000)
        sample.relays = list(await asyncio.gather(*(relay.ask() for relay in self._relays)))
        main = self._relays[0]
        if main.no_keys:
            sample.problems.append(f"members and streams are not shown: {main.no_keys}")
        if main.client is None or sample.relays[0].report is None:
            return sample
        self._follower.follow(main.client, self._wanted(main.client, sample.relays))
        await self._follower.listed(timeout)
        sample.clusters = self._follower.answers()
        streams, _ = await asyncio.gather(
            self._streams.ask(main.client, sample.at_s, timeout),
            self._members.ask(main.client, sample.clusters, timeout),
        )
        sample.streams, problems = streams
        errors = [f"members of {name}: {why}" for name, why in self._follower.errors.items()]
        sample.problems += problems + errors
        return sample

    def _wanted(self, client: Client, answers: Sequence[RelayAnswer]) -> list[str]:
        """Return the clusters to follow: those named, those of the keyring, and those of relays with a key here."""
        keyring = client.keyring
        entries = [name for name in keyring.entries() if name != "default" and ":" not in name]
        counted: list[str] = []
        for answer in answers:
            for table in ("clusters", "linked_clusters"):
                found = (answer.report or {}).get(table, {})
                counted += found if isinstance(found, dict) else ()
        names = dict.fromkeys([*self._clusters, *counted, *entries])
        return [name for name in names if _has_key(client, name)][:MAX_FOLLOWED]

    async def close(self) -> None:
        """Disconnect from all relays, also if this is cancelled."""
        try:
            await self._follower.close()
        finally:
            await asyncio.gather(*(relay.close() for relay in self._relays))


def _has_key(client: Client, name: str) -> bool:
    try:
        return bool(client.keyring.for_cluster(name))
    except IrisError:  # a name that relays of other versions allow
        return False


@contextlib.asynccontextmanager
async def asking(
    relays: Sequence[str | Client | None], clusters: Sequence[str], opener: Opener
) -> AsyncIterator[Asking]:
    """Ask while the block runs."""
    found = Asking(relays, clusters, opener)
    try:
        yield found
    finally:
        await found.close()
