"""Bearer tokens, their allow-lists, and the limit of wrong ones."""

from __future__ import annotations

from pathlib import Path

import pytest

from iris.errors import ConfigError
from iris.web.attempts import BURST, INTERVAL_S, Attempts
from iris.web.tokens import Caller, Tokens, hash_token, new_token

VERBS = ("request", "push", "publish", "subscribe", "append", "read")
SECRET = "a-token-of-enough-characters-0123456789"


def written(tmp_path: Path, text: str, mode: int = 0o600) -> Path:
    path = tmp_path / "tokens.toml"
    path.write_text(text)
    path.chmod(mode)
    return path


def test_a_token_in_the_file_finds_its_caller(tmp_path: Path) -> None:
    path = written(
        tmp_path,
        f"""
        [[token]]
        name = "shop"
        token = "{SECRET}"
        allow.push = ["orders", "mail.*"]

        [[token]]
        name = "reader"
        sha256 = "{hash_token("another-token-0123456789-0123456789")}"
        allow.subscribe = [">"]
        """,
    )
    tokens = Tokens.load(path, VERBS)
    assert len(tokens) == 2
    shop = tokens.find(SECRET)
    assert shop is not None
    assert shop.name == "shop"
    assert shop.may("push", "mail.welcome")
    assert not shop.may("push", "mail.welcome.again")
    assert not shop.may("request", "orders")
    reader = tokens.find("another-token-0123456789-0123456789")
    assert reader is not None
    assert reader.may_filter("subscribe", "a.>")
    assert reader.verbs == ["subscribe"]
    assert tokens.find(SECRET + "x") is None
    assert tokens.find("") is None
    assert tokens.find("x" * 100_000) is None


def test_no_token_is_kept_or_shown(tmp_path: Path) -> None:
    tokens = Tokens.load(written(tmp_path, f'[[token]]\nname = "a"\ntoken = "{SECRET}"\nallow.push = ["b"]\n'), VERBS)  # fmt: skip
    assert SECRET not in repr(vars(tokens))
    assert hash_token(SECRET) not in repr(vars(tokens))
    assert repr(tokens.find(SECRET)) == "Caller('a')"


def test_tokens_are_looked_up_by_a_hash_under_a_key_of_this_process(tmp_path: Path) -> None:
    """So nobody who measures the time of a lookup can choose tokens whose hashes resemble a known one."""
    path = written(tmp_path, f'[[token]]\nname = "a"\ntoken = "{SECRET}"\nallow.push = ["b"]\n')
    one, two = Tokens.load(path, VERBS), Tokens.load(path, VERBS)
    assert one.find(SECRET) is not None
    assert two.find(SECRET) is not None
    assert one._callers.keys().isdisjoint(two._callers)


def test_a_made_token_is_long_and_of_characters_that_a_header_may_have() -> None:
    token = new_token()
    assert len(token) == 48
    assert token != new_token()
    assert Tokens.single(token, "me", {"push": [">"]}).find(token)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", None),
        ("[[tokens]]\n", "tokens: unknown"),
        ("token = 3\n", "token: write [[token]]"),
        ("token = [3]\n", "token 1: it is not a table"),
        ("[[token]\n", "Expected"),
        ("[[token]]\n", "token 1: name: give it a name"),
        ('[[token]]\nname = "a b"\n', "token 1: name: give it a name"),
        ('[[token]]\nname = "a"\n', "token 1: sha256: give one of sha256 and token"),
        ('[[token]]\nname = "a"\ntoken = "short"\n', "token 1: token: use 32 to 1024"),
        (f'[[token]]\nname = "a"\ntoken = "{SECRET} {SECRET}"\n', "token 1: token: use 32 to 1024"),
        ('[[token]]\nname = "a"\nsha256 = "00"\n', "token 1: sha256: write the SHA-256"),
        (f'[[token]]\nname = "a"\ntoken = "{SECRET}"\n', 'allow: say what the token is for, such as allow.request = ["NAME"]'),
        (f'[[token]]\nname = "a"\ntoken = "{SECRET}"\nallow = ["push"]\n', "allow: say what the token is for"),
        (f'[[token]]\nname = "a"\ntoken = "{SECRET}"\nallow.pusch = ["b"]\n', "allow.pusch: there is no such verb; did you mean 'push'?"),
        (f'[[token]]\nname = "a"\ntoken = "{SECRET}"\nallow.push = "b"\n', "allow.push: write a list of names"),
        (f'[[token]]\nname = "a"\ntoken = "{SECRET}"\nallow.push = ["b c"]\n', "allow.push: 'b c' is not a topic filter"),
        (f'[[token]]\nname = "a"\ntoken = "{SECRET}"\nallow.push = ["b"]\nalow = 3\n', "alow: unknown setting; did you mean 'allow'?"),
        (f'[[token]]\nname = "a"\ntoken = "{SECRET}"\nallow.push = ["b"]\n' * 2, "token 2: name: 'a' is used twice"),
    ],
)  # fmt: skip
def test_a_file_that_is_wrong_is_refused_with_what_to_write(
    tmp_path: Path, text: str, said: str | None
) -> None:
    path = written(tmp_path, text)
    if said is None:
        assert len(Tokens.load(path, VERBS)) == 0
        return
    with pytest.raises(ConfigError) as refused:
        Tokens.load(path, VERBS)
    assert said in str(refused.value)
    assert str(refused.value).startswith(f"{path}: ")
    assert SECRET not in str(refused.value)
    assert refused.value.__cause__ is None or SECRET not in repr(refused.value.__cause__)


def test_two_entries_of_one_token_are_refused(tmp_path: Path) -> None:
    entry = f'[[token]]\nname = "{{}}"\ntoken = "{SECRET}"\nallow.push = ["b"]\n'
    with pytest.raises(ConfigError, match="token 2: it is the token of 'a', too"):
        Tokens.load(written(tmp_path, entry.format("a") + entry.format("b")), VERBS)


def test_a_file_that_others_can_read_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="open to other users"):
        Tokens.load(written(tmp_path, "", 0o644), VERBS)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nothing\.toml: cannot be read: No such file"):
        Tokens.load(tmp_path / "nothing.toml", VERBS)


def test_a_name_of_another_site_needs_an_entry_that_names_the_site() -> None:
    caller = Caller("a", {"request": [">", "eu:billing"], "publish": [">"]})
    assert caller.may("request", "billing")
    assert caller.may("request", ".:billing")
    assert caller.may("request", "eu:billing")
    assert not caller.may("request", "eu:orders")
    assert not caller.may("request", "us:billing")
    assert caller.may("publish", "eu:billing")  # a topic names no site


def test_a_filter_is_allowed_only_if_all_its_topics_are() -> None:
    caller = Caller("a", {"subscribe": ["shop.*", "news.>"]})
    assert caller.may_filter("subscribe", "shop.*")
    assert caller.may_filter("subscribe", "shop.orders")
    assert caller.may_filter("subscribe", "news.>")
    assert not caller.may_filter("subscribe", "shop.>")
    assert not caller.may_filter("subscribe", "*.orders")
    assert not caller.may_filter("subscribe", ">")


def test_wrong_tokens_of_an_address_are_limited_and_forgiven_with_time() -> None:
    attempts = Attempts()
    assert [attempts.wait_s("192.0.2.1", 100.0) for _ in range(BURST)] == [0.0] * BURST
    assert 0 < attempts.wait_s("192.0.2.1", 100.0) <= INTERVAL_S
    assert attempts.wait_s("192.0.2.2", 100.0) == 0
    assert attempts.wait_s("192.0.2.1", 100.0 + INTERVAL_S) == 0
    assert attempts.wait_s("192.0.2.1", 100.0 + INTERVAL_S) > 0


def test_a_host_cannot_get_around_the_limit_with_more_addresses_of_its_own_network() -> None:
    attempts = Attempts()
    waits = [attempts.wait_s(f"2001:db8::{number:x}", 0.0) for number in range(1, BURST + 2)]
    assert waits[-1] > 0
    assert attempts.wait_s("2001:db8:0:1::1", 0.0) == 0
    for _ in range(BURST):
        attempts.wait_s("::ffff:192.0.2.1", 0.0)
    assert attempts.wait_s("192.0.2.1", 0.0) > 0


def test_the_table_of_addresses_is_bounded_and_its_overflow_shares_one_limit() -> None:
    attempts = Attempts(max_addresses=3)
    for number in range(3):
        assert attempts.wait_s(f"192.0.2.{number}", 0.0) == 0
    waits = [attempts.wait_s(f"198.51.100.{number}", 0.0) for number in range(BURST + 5)]
    assert waits[BURST - 1] == 0
    assert waits[BURST] > 0
    assert len(attempts) == 4
    assert attempts.wait_s("203.0.113.1", 1000.0) == 0  # the others are forgotten by then
    assert len(attempts) == 1
