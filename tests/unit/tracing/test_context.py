"""The trace context in headers: what is put into them, and what of it is believed."""

from __future__ import annotations

import logging
import string
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from opentelemetry import baggage, context, trace
from opentelemetry.baggage.propagation import W3CBaggagePropagator
from opentelemetry.propagators.composite import CompositePropagator
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.trace import Span, TraceState, get_current_span
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from iris.core.bundle import MAX_HEADERS_BYTES, check_headers
from iris.tracing.context import Propagation

W3C = CompositePropagator([TraceContextTextMapPropagator(), W3CBaggagePropagator()])
PROPAGATION = Propagation(W3C)
TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
SPAN = "00f067aa0ba902b7"
GOOD = f"00-{TRACE}-{SPAN}-01"


@pytest.fixture
def span() -> Span:
    return TracerProvider().get_tracer("test").start_span("send")


def parent(headers: Any) -> str:
    """Return the span that a message with these headers names as its sender's; "" if none."""
    found = get_current_span(PROPAGATION.extract(headers)).get_span_context()
    return f"{found.trace_id:032x}-{found.span_id:016x}" if found.is_valid else ""


def test_what_was_injected_is_extracted(span: Span) -> None:
    sent = span.get_span_context()
    found = get_current_span(PROPAGATION.extract(PROPAGATION.inject(span, None, "x")))
    assert found.get_span_context().trace_id == sent.trace_id
    assert found.get_span_context().span_id == sent.span_id
    assert found.get_span_context().is_remote


def test_the_senders_headers_are_kept_and_neither_changed_nor_replaced(span: Span) -> None:
    headers = {"tenant": "acme", "baggage": "mine=1"}
    token = context.attach(baggage.set_baggage("other", "2"))
    try:
        carried = PROPAGATION.inject(span, headers, "x")
    finally:
        context.detach(token)
    assert headers == {"tenant": "acme", "baggage": "mine=1"}
    assert carried == {**headers, "traceparent": carried["traceparent"]}


@pytest.mark.parametrize("own", [{"traceparent": GOOD}, {"tracestate": "a=b"}])
def test_a_context_of_the_senders_own_is_sent_alone(span: Span, own: dict[str, str]) -> None:
    assert PROPAGATION.inject(span, own, "x") == own


def test_baggage_and_tracestate_travel(span: Span) -> None:
    state = trace.NonRecordingSpan(
        trace.SpanContext(1, 2, False, trace.TraceFlags(1), TraceState([("vendor", "x")]))
    )
    token = context.attach(baggage.set_baggage("tenant", "acme"))
    try:
        carried = PROPAGATION.inject(state, None, "x")
    finally:
        context.detach(token)
    found = PROPAGATION.extract(carried)
    assert baggage.get_all(found) == {"tenant": "acme"}
    assert get_current_span(found).get_span_context().trace_state == {"vendor": "x"}


def test_what_is_current_where_a_message_arrives_is_not_its_context(span: Span) -> None:
    token = context.attach(baggage.set_baggage("of", "this process"))
    try:
        assert PROPAGATION.extract(None) == {}
        assert PROPAGATION.extract({"tenant": "acme"}) == {}
        assert not baggage.get_all(PROPAGATION.extract({"traceparent": GOOD}))
    finally:
        context.detach(token)


@pytest.mark.parametrize(
    "value",
    [
        "",
        "garbage",
        "00",
        GOOD.upper(),
        f"00-{'0' * 32}-{SPAN}-01",
        f"00-{TRACE}-{'0' * 16}-01",
        f"ff-{TRACE}-{SPAN}-01",
        f"{GOOD}-more",
        f"00-{TRACE}-{SPAN}-0",
        f"00-{TRACE}-{SPAN}-zz",
        f"00-{TRACE[:-1]}-{SPAN}-01",
        f"0x-{TRACE}-{SPAN}-01",
        f"00-{TRACE}-{SPAN}-01\x00",
        f"00-{TRACE}-{'٣' * 16}-01",
        "00-" + "0" * 2900,
        "-" * 2900,
    ],
    ids=str,
)
def test_a_malformed_traceparent_is_ignored(value: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.DEBUG):
        assert parent({"traceparent": value}) == ""
    assert not caplog.records


@pytest.mark.parametrize("value", [GOOD, f"01-{TRACE}-{SPAN}-01-what.comes.later", f" {GOOD} "])
def test_a_valid_traceparent_is_believed_also_of_a_later_version(value: str) -> None:
    assert parent({"traceparent": value}) == f"{TRACE}-{SPAN}"


@pytest.mark.parametrize(
    "field",
    [
        {"tracestate": "x" * 600},
        {"tracestate": "nonsense"},
        {"tracestate": "a=b,=c"},
        {"tracestate": "1=b"},
        {"tracestate": ",".join(f"k{n}=v" for n in range(33))},
        {"tracestate": "a=b\x00"},
        {"baggage": "x" * 2900},
        {"baggage": "nonsense"},
        {"baggage": ",".join("a" for _ in range(1000))},
        {"baggage": ",".join(f"{n}=1" for n in range(200))},
        {"baggage": "ä=1"},
        {"baggage": "a=\"1"},
        {"baggage": "=1"},
        {"baggage": "a=1;=2"},
        {"baggage": "\x00=1"},
        {"baggage": "a b=c d"},
    ],
    ids=str,
)  # fmt: skip
def test_malformed_fields_are_left_out_without_a_log_line_and_the_parent_stays(
    field: dict[str, str], caplog: pytest.LogCaptureFixture
) -> None:
    """OpenTelemetry would log each of them, and so a peer could fill the log."""
    with caplog.at_level(logging.DEBUG):
        found = PROPAGATION.extract({"traceparent": GOOD, **field})
    assert not caplog.records
    assert parent({"traceparent": GOOD, **field}) == f"{TRACE}-{SPAN}"
    assert not baggage.get_all(found)
    assert not get_current_span(found).get_span_context().trace_state


@given(
    st.dictionaries(
        st.sampled_from(["traceparent", "tracestate", "baggage", "b3"]),
        st.text(st.characters(max_codepoint=300), max_size=60)
        | st.text("0123456789abcdef-", max_size=60)
        | st.text(string.printable, max_size=60),
    )
)
def test_no_headers_raise_or_are_logged(headers: dict[str, str]) -> None:
    lines: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = lines.append  # type: ignore[method-assign]  # of this handler
    root = logging.getLogger("opentelemetry")
    root.addHandler(handler)
    try:
        PROPAGATION.extract(headers)
        PROPAGATION.link(headers)
    finally:
        root.removeHandler(handler)
    assert not lines


def carry_full(span: Span, tenant: int, baggage_size: int) -> dict[str, str]:
    held = baggage.set_baggage("big", "b" * baggage_size)
    token = context.attach(held)
    try:
        return Propagation(W3C).inject(span, {"tenant": "t" * tenant} if tenant else None, "shop")
    finally:
        context.detach(token)


def test_what_would_exceed_the_limit_is_left_out_and_the_call_succeeds(
    span: Span, caplog: pytest.LogCaptureFixture
) -> None:
    carried = carry_full(span, 100, 100)
    assert carried.keys() == {"tenant", "traceparent", "baggage"}
    assert not caplog.records
    for tenant, size in ((0, 4000), (2000, 1500)):
        caplog.clear()
        carried = carry_full(span, tenant, size)
        assert carried.keys() == ({"tenant", "traceparent"} if tenant else {"traceparent"})
        check_headers(carried)
        (record,) = caplog.records
        assert "baggage" in record.getMessage()
    carried = carry_full(span, MAX_HEADERS_BYTES - 20, 0)
    assert carried.keys() == {"tenant"}
    check_headers(carried)


def test_contexts_that_do_not_fit_are_logged_once_in_a_while(
    span: Span, caplog: pytest.LogCaptureFixture
) -> None:
    propagation = Propagation(W3C)
    for _ in range(100):
        propagation.inject(span, {"tenant": "t" * (MAX_HEADERS_BYTES - 20)}, "shop")
    assert len(caplog.records) == 1


def test_headers_that_cannot_be_sent_are_left_for_the_call_to_refuse(span: Span) -> None:
    wrong: Any = {"tenant": object()}
    assert PROPAGATION.inject(span, wrong, "shop")["tenant"] is wrong["tenant"]
