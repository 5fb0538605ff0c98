"""Streams and their consumers, with lag and dead letters, from what stores say."""

from __future__ import annotations

from collections.abc import Sequence

from iris.streams.listing import StreamInfo
from iris.watch.history import History
from iris.watch.network import MAX_CONSUMERS, Consumer, Stream
from iris.watch.sample import StreamAnswer, number, sentence, text, whole
from iris.wire.consumers import ConsumerInfo
from iris.wire.orders import DEAD


class StreamReader:
    """Reads the streams of one sample after the other."""

    def __init__(self, history: History) -> None:
        self._history = history
        self._streams: list[Stream] = []
        self._consumers: dict[str, tuple[list[Consumer], int]] = {}
        """Uuid of a stream -> its consumers as they were last, and how many more there are."""

    def read(self, answers: list[StreamAnswer] | None) -> list[Stream]:
        """Return the streams of one sample; those of the one before if stores were not asked."""
        if answers is None:
            return self._streams
        dead = {
            (answer.info.store, answer.info.name): whole(answer.info.messages)
            for answer in answers
            if answer.info.name.endswith(DEAD)
        }
        consumers, streams = {}, []
        for answer in answers:
            info = answer.info
            if answer.consumers is not None:
                consumers[info.uuid] = self._read_consumers(info, answer.consumers)
            elif info.uuid in self._consumers:
                consumers[info.uuid] = self._consumers[info.uuid]
            if not info.name.endswith(DEAD):
                letters = dead.get((info.store, info.name + DEAD), 0)
                streams.append(self._stream(info, letters, *consumers.get(info.uuid, ([], 0))))
        self._consumers, self._streams = consumers, streams
        return streams

    def _stream(self, info: StreamInfo, dead: int, consumers: list[Consumer], more: int) -> Stream:
        return Stream(
            name=text(info.name), uuid=text(info.uuid), host=text(info.host), store=text(info.store),
            source=text(_source(info)), messages=whole(info.messages), size_bytes=whole(info.size_bytes),
            in_rate=self._history.rate(("stream", info.uuid), whole(info.end)), lost_messages=whole(info.lost_messages),
            paused=info.paused, failed=sentence(info.failed), dead_letters=dead, mirror_lag=info.lag,
            lag=max((consumer.lag for consumer in consumers), default=0), consumers=consumers, other_consumers=more,
        )  # fmt: skip

    def _read_consumers(
        self, info: StreamInfo, said: Sequence[ConsumerInfo]
    ) -> tuple[list[Consumer], int]:
        worst = sorted(said, key=lambda each: -each.lag)[:MAX_CONSUMERS]
        rows = [self._consumer(info, each) for each in sorted(worst, key=lambda each: each.name)]
        return rows, len(said) - len(rows)

    def _consumer(self, info: StreamInfo, said: ConsumerInfo) -> Consumer:
        key = (info.uuid, said.name)
        # What was settled is what the stream holds up to its end and the lag does not.
        settled = self._history.rate(("settled", *key), number(info.end) - number(said.lag))
        return Consumer(
            name=text(said.name), shared=said.shared, workers=whole(said.workers), lag=whole(said.lag),
            pending=whole(said.pending), redelivering=whole(said.redelivering), dead=whole(said.dead),
            missed=whole(said.missed), late=whole(said.late), paused=said.paused,
            lag_rate=self._history.trend(("lag", *key), number(said.lag)), settled_rate=settled,
        )  # fmt: skip


def _source(info: StreamInfo) -> str:
    if info.mirror:
        return f"mirror of {info.source}"
    if info.topic:
        return f"topic {info.topic}"
    return f"cluster {info.cluster}" if info.cluster else ""
